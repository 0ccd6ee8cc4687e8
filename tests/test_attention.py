"""Attention with dropout: the shards of the batch and of the heads drop at their own places."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_semantics import shard_key, state
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, empty
from torch.nn.attention import SDPBackend, sdpa_kernel
from worlds import as_rank, default_generator, each_rank

from torch_dtensor_rng import _dispatch, _ops

ATTENTION = {row.overload.removesuffix(".default"): row for row in _ops.TABLE if row.placed is _ops.Placed.TORCH_RULE}
FLASH, EFFICIENT, CUDNN = ATTENTION
# How the op is called with a dropout of 0.5.
ARGUMENTS = {FLASH: (0.5,), EFFICIENT: (None, True, 0.5), CUDNN: (None, True, 0.5)}
PLACEMENTS = [(Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Shard(1)), (Shard(0), Replicate())]


def on_the_cpu(name):
    """Stands in for a CUDA kernel: the dropped scores of uniform attention times the values, and outputs of the right
    kinds."""

    def attention(query, key, value, *args, generator=None, **kwargs):
        p = next(one for one in args if isinstance(one, float))
        *batch, length, _ = query.shape
        scores = torch.empty(*batch, length, key.shape[-2]).bernoulli_(1 - p, generator=generator)
        out, logsumexp = scores @ value, torch.zeros(*batch, length)
        seed = offset = torch.zeros((), dtype=torch.int64)
        state, nothing = torch.zeros(2, dtype=torch.int64), torch.zeros(0)
        return {
            FLASH: (out, logsumexp, None, None, length, key.shape[-2], state, seed, nothing),
            EFFICIENT: (out, logsumexp, seed, offset),
            CUDNN: (out, logsumexp.unsqueeze(-1), None, None, length, key.shape[-2], seed, offset, None),
        }[name]

    return attention


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("name", ATTENTION)
def test_how_shards_are_placed_and_drawn(name, placements, installed, monkeypatch):
    row = dataclasses.replace(ATTENTION[name], call=on_the_cpu(name))
    monkeypatch.setitem(
        DTensor._op_dispatcher._custom_op_handlers, row.op, _dispatch.make_handler(row, _dispatch.Policy())
    )

    def on_rank(rank, mesh):
        torch.manual_seed(0)
        q = empty(4, 4, 6, 8, device_mesh=mesh, placements=placements).fill_(1)
        out, *_ = row.op(q, q, q, *ARGUMENTS[name])
        assert out.placements == placements and out.shape == q.shape
        end = state(torch.default_generator)
        second, *_ = row.op(q, q, q, *ARGUMENTS[name])
        assert not torch.equal(out.to_local(), second.to_local())
        return shard_key(mesh, placements), out.to_local(), end

    check_shards(each_rank((2, 2), on_rank))


def check_shards(results):
    shards = {}
    for at, out, _ in results:
        assert torch.equal(shards.setdefault(at, out), out), "replicas agree"
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(shards.values(), 2)), "shards differ"
    assert len({end for _, _, end in results}) == 1, "ranks are in step"


@pytest.mark.parametrize("name", ATTENTION)
def test_an_input_that_torchs_rule_redistributes(name, installed, monkeypatch):
    """A shard of the head dim or of the sequence is no shard of attention's."""
    seen = []

    def call(query, key, value, *args, **kwargs):
        seen.append((query.shape, key.shape, value.shape))
        return on_the_cpu(name)(query, key, value, *args, **kwargs)

    row = dataclasses.replace(ATTENTION[name], call=call)
    handler = _dispatch.make_handler(row, _dispatch.Policy())
    mesh = as_rank(1, (2, 2))
    for placements in ([Shard(0), Shard(2)], [Shard(0), Shard(3)], [Shard(0), Partial()]):
        q = empty(4, 4, 6, 8, device_mesh=mesh, placements=placements).fill_(1)
        out, *_ = handler(row.op, (q, q, q, *ARGUMENTS[name]), {})
        local = out.to_local().shape
        assert seen[-1] == (local, local, local) and local[2:] == (6, 8), "whole sequences and heads"


@pytest.mark.parametrize("name", ATTENTION)
def test_without_dropout_it_is_torchs_own_path(name, installed):
    def call(*args, **kwargs):
        raise AssertionError("there is nothing to draw")

    row = dataclasses.replace(ATTENTION[name], call=call)
    q = empty(4, 4, 6, 8, device_mesh=as_rank(1, (2, 2)), placements=[Shard(0), Shard(1)]).fill_(1)
    arguments = tuple(0.0 if one == 0.5 else one for one in ARGUMENTS[name])
    with pytest.raises(NotImplementedError, match="Could not run"):  # there is no such kernel on the CPU
        _dispatch.make_handler(row, _dispatch.Policy())(row.op, (q, q, q, *arguments), {})


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU, with the kernels themselves. Query and key are zeros, so that every score is 1 / length; the values are the
# identity, so that the output is the matrix of what was kept.
# ---------------------------------------------------------------------------------------------------------------------

BACKENDS = [
    (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
    (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    (SDPBackend.MATH, torch.float32),
]
_ids = [f"{backend.name}-{dtype}" for backend, dtype in BACKENDS]


def queries_and_values(mesh, placements, dtype, batch=4, heads=4, length=64):
    where = {"device_mesh": mesh, "placements": placements, "dtype": dtype}
    query = empty(batch, heads, length, length, **where).fill_(0)
    value = empty(batch, heads, length, length, **where)
    value.to_local().copy_(torch.eye(length, dtype=dtype, device="cuda").expand_as(value.to_local()))
    return query, value


@pytest.mark.gpu
@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("backend, dtype", BACKENDS, ids=_ids)
def test_masks(backend, dtype, placements, installed):
    if backend is SDPBackend.MATH and placements[0] == placements[1]:
        pytest.skip("torch cannot flatten a dim that is sharded twice")

    def on_rank(rank, mesh):
        query, value = queries_and_values(mesh, placements, dtype)
        value.requires_grad_()
        generator = default_generator("cuda")
        torch.manual_seed(0)
        with sdpa_kernel(backend):
            try:
                out = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
            except RuntimeError as error:
                if backend is not SDPBackend.MATH:
                    raise
                pytest.skip(f"torch {torch.__version__} cannot place it: {str(error)[:80]}")
            kept = out.to_local().detach().clone()
            end = generator.get_offset()
            assert 0.3 < kept.ne(0).double().mean() < 0.7
            out.backward(torch.ones_like(out))
            assert generator.get_offset() == end, "the backward pass draws nothing"
            # The gradient of a value is what all queries kept of it.
            columns = kept.double().sum(-2).unsqueeze(-1).expand(value.grad.to_local().shape)
            torch.testing.assert_close(value.grad.to_local().double(), columns, rtol=2e-2, atol=2e-2)
            second = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
            assert not torch.equal(kept, second.to_local())
            torch.manual_seed(0)
            again = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
            assert torch.equal(kept, again.to_local()), "reseeding repeats"
            torch.manual_seed(0)
            F.scaled_dot_product_attention(query, query, value, dropout_p=0.0)
            assert generator.get_offset() == 0, "no dropout draws nothing"
        return shard_key(mesh, placements), kept, end

    check_shards(each_rank((2, 2), on_rank, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend, dtype", BACKENDS[:-1], ids=_ids[:-1])
def test_replicated_attention_is_the_plain_call(backend, dtype, installed):
    mesh = as_rank(1, (2, 2), "cuda")
    query, value = queries_and_values(mesh, [Replicate(), Replicate()], dtype)
    with sdpa_kernel(backend):
        torch.manual_seed(0)
        ours = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5).to_local()
        torch.manual_seed(0)
        plain = F.scaled_dot_product_attention(query.to_local(), query.to_local(), value.to_local(), dropout_p=0.5)
    assert torch.equal(ours, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("length, key_length", [(1, 1), (3, 77), (64, 64), (2048, 2048)])
@pytest.mark.parametrize("backend, dtype", BACKENDS[:-1], ids=_ids[:-1])
def test_a_shard_has_room_for_what_its_kernel_takes(backend, dtype, length, key_length, installed):
    mesh = as_rank(1, (2, 2), "cuda")
    spec = empty(4, 4, length, 64, device_mesh=mesh, placements=[Shard(0), Shard(1)], dtype=dtype)._spec
    layout = _dispatch._attention_layout(spec, torch.Size((4, 4, length, 64)), torch.Size((4, 4, key_length, 64)))
    query = torch.zeros(2, 2, length, 64, dtype=dtype, device="cuda")
    key = torch.zeros(2, 2, key_length, 64, dtype=dtype, device="cuda")
    generator = default_generator("cuda")
    torch.manual_seed(0)
    with sdpa_kernel(backend):
        try:
            F.scaled_dot_product_attention(query, key, key, dropout_p=0.5)
        except RuntimeError as error:
            pytest.skip(f"the kernel does not take it: {str(error)[:80]}")
    assert 0 < generator.get_offset() <= layout.step


@pytest.mark.gpu
@pytest.mark.parametrize("backend, dtype", BACKENDS[:-1], ids=_ids[:-1])
def test_compiled_attention_is_eager(backend, dtype, installed):
    mesh = as_rank(1, (2, 2), "cuda")
    query, value = queries_and_values(mesh, [Shard(0), Shard(1)], dtype)

    def attention(query, value):
        return F.scaled_dot_product_attention(query, query, value, dropout_p=0.5) * 2

    with sdpa_kernel(backend):
        torch.manual_seed(0)
        eager = attention(query, value).to_local()
        end = default_generator("cuda").get_offset()
        torch.manual_seed(0)
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)(query, value).to_local()
    assert torch.equal(eager, compiled)
    assert default_generator("cuda").get_offset() == end
