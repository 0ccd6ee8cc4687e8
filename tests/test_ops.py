"""The tables of ops: nothing that draws is in none of them; further tensor arguments, whole rows, and refusals."""

import itertools
from types import SimpleNamespace

import ops_page
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_disjoint import Sharding, shardings
from test_semantics import OPS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from worlds import as_rank, default_generator, each_rank, gloo

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _composed, _dispatch, _ops

aten = torch.ops.aten
TABLES = {
    "the table": [row.overload for row in _ops.TABLE],
    "composed": list(_composed.COMPOSED),
    "decomposed": _ops.DECOMPOSED,
    "refused": list(_ops.REFUSED),
    "out of scope": list(_ops.OUT_OF_SCOPE),
}


def tagged_overloads():
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, one = name.removeprefix("aten::").partition(".")
            short = f"{packet}.{one or 'default'}"
            if _ops.exists(short) and torch.Tag.nondeterministic_seeded in _ops.overload(short).tags:
                names.append(short)
    return names


def test_every_overload_that_draws_is_in_one_table():
    names = tagged_overloads()
    assert len(names) > 140
    found = {name: [table for table, members in TABLES.items() if name in members] for name in names}
    assert {name: tables for name, tables in found.items() if len(tables) != 1} == {}


def test_every_table_has_only_overloads_that_draw():
    names = set(tagged_overloads())
    for members in TABLES.values():
        assert {name for name in members if _ops.exists(name)} <= names


def test_every_row_is_drawn_by_the_tests_of_the_promises(installed, monkeypatch):
    drawn = set()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for op, handler in [*handlers.items()]:
        if op in _dispatch.HANDLERS or op in _composed.HANDLERS:

            def spy(op, args, kwargs, handler=handler):
                drawn.add(op)
                return handler(op, args, kwargs)

            monkeypatch.setitem(handlers, op, spy)
    mesh = as_rank(1, (4,))
    for draw in OPS.values():
        for generator in (None, torch.Generator()):
            draw(empty(16, 6, device_mesh=mesh, placements=[Shard(0)]), generator)
    attention = {row.op for row in _ops.TABLE if row.placed is _ops.Placed.TORCH_RULE}
    expected = {row.op for row in _ops.TABLE} | {_ops.overload(name) for name in _composed.COMPOSED}
    assert {str(op) for op in expected - attention - drawn} == set()


def test_everything_refused_has_its_refusal(installed):
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for name, way_out in _ops.REFUSED.items():
        if _ops.exists(name):
            with pytest.raises(NotImplementedError) as raised:
                handlers[_ops.overload(name)](_ops.overload(name), (None, None, None, 0.5), {})
            assert str(raised.value).startswith(f"aten.{name}: ") and way_out in str(raised.value)


@pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
def test_a_bad_probability_leaves_the_generator_where_it_was(p, installed):
    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        torch.bernoulli(x * p)
    with pytest.raises(RuntimeError):
        x.bernoulli_(x * p)
    assert torch.equal(before, torch.get_rng_state())


# What is drawn is certain, so that it shows which element of an argument met which of the other. Each takes the
# placements of its arguments.
CERTAIN = {
    "normal(mean, std)": lambda at: (
        torch.normal(at(RAMP, 0), at(torch.zeros(1, 6), 1)),
        RAMP,
    ),
    "normal(mean of a column, std)": lambda at: (
        torch.normal(at(RAMP[:, :1].clone(), 0), at(torch.zeros(8, 6), 1)),
        RAMP[:, :1].expand(8, 6),
    ),
    "normal(mean, std) of a column": lambda at: (
        torch.normal(at(RAMP, 0), at(torch.zeros(8, 1), 1)),
        RAMP,
    ),
    "normal(mean, 0.0)": lambda at: (torch.normal(at(RAMP, 0), 0.0), RAMP),
    "normal(2.0, std)": lambda at: (torch.normal(2.0, at(torch.zeros(8, 6), 0)), torch.full((8, 6), 2.0)),
    "normal(scalar tensor, std)": lambda at: (
        torch.normal(torch.tensor(2.0), at(torch.zeros(8, 6), 0)),
        torch.full((8, 6), 2.0),
    ),
    "bernoulli_(p)": lambda at: (at(RAMP, 0, False).bernoulli_(at(RAMP % 2, 1)), RAMP % 2),
    "bernoulli_(p of a row)": lambda at: (
        at(RAMP, 0, False).bernoulli_(at(RAMP[:1] % 2, 1)),
        (RAMP[:1] % 2).expand(8, 6),
    ),
    "bernoulli_(scalar tensor)": lambda at: (at(RAMP, 0, False).bernoulli_(torch.tensor(1.0)), torch.ones(8, 6)),
    "bernoulli(x, p)": lambda at: (aten.bernoulli.Tensor(at(RAMP, 0), at(RAMP % 2, 1)), RAMP % 2),
    "bernoulli(p)": lambda at: (torch.bernoulli(at(RAMP % 2, 0)), RAMP % 2),
    "binomial(count, prob)": lambda at: (torch.binomial(at(RAMP, 0), at(RAMP % 2, 1)), RAMP * (RAMP % 2)),
    "binomial(count, prob of a row)": lambda at: (
        torch.binomial(at(RAMP, 0), at(RAMP[:1] % 2, 1)),
        RAMP * (RAMP[:1] % 2),
    ),
    "binomial(count of a column, prob)": lambda at: (
        torch.binomial(at(RAMP[:, :1].clone(), 0), at(RAMP % 2, 1)),
        RAMP[:, :1] * (RAMP % 2),
    ),
    "binomial(scalar tensor, prob)": lambda at: (torch.binomial(torch.tensor(3.0), at(RAMP % 2, 0)), 3 * (RAMP % 2)),
    "poisson(0)": lambda at: (torch.poisson(at(torch.zeros(8, 6), 0)), torch.zeros(8, 6)),
    "multinomial(one hot)": lambda at: (
        torch.multinomial(at(torch.eye(8, 6), 0)[:6], 2, True),
        torch.arange(6).unsqueeze(1).expand(6, 2),
    ),
    "multinomial(one row)": lambda at: (
        torch.multinomial(at(torch.eye(8, 6), 0)[3], 2, True),
        torch.tensor([3, 3]),
    ),
    "rrelu": lambda at: (torch.rrelu(at(-RAMP, 0, False), 0.5, 0.5, True), -RAMP / 2),
    "rrelu in evaluation": lambda at: (torch.rrelu(at(-RAMP, 0, False), 0.25, 0.75, False), -RAMP / 2),
}
RAMP = torch.arange(48.0).reshape(8, 6)
SPREAD = {
    "S0": [Shard(0), Shard(0)],
    "S1": [Shard(1), Shard(1)],
    "S0 S1": [Shard(0), Shard(1)],
    "R S0": [Replicate(), Shard(0)],
    "R": [Replicate(), Replicate()],
    "P S1": [Partial(), Shard(1)],
    "P P": [Partial(), Partial()],
}


def certain(rank, name, first):
    """Runs the op with its first argument placed by ``first``, and the second one by every placement."""
    mesh = init_device_mesh("cpu", (2, 2))

    def state():
        return torch.get_rng_state().numpy().tobytes()

    ends = []
    with tdr.install():
        for second in SPREAD.values():

            def at(whole, argument, partial=True, second=second):
                placements = SPREAD[first] if argument == 0 else second
                kept = [Replicate() if one.is_partial() else one for one in placements]
                kept = [Replicate() if getattr(one, "dim", 0) and whole.size(1) == 1 else one for one in kept]
                x = distribute_tensor(whole, mesh, kept)
                if partial and kept != placements:  # as a sum over ranks of which one holds the values
                    for mesh_dim, placement in enumerate(placements):
                        if placement.is_partial() and mesh.get_coordinate()[mesh_dim]:
                            x = x * 0
                    both = [p if p.is_partial() else k for p, k in zip(placements, kept)]
                    x = DTensor.from_local(x.to_local(), mesh, both, run_check=False, shape=x.shape, stride=x.stride())
                return x

            torch.manual_seed(0)
            drawn, expected = CERTAIN[name](at)
            assert not any(one.is_partial() for one in drawn.placements)
            assert torch.equal(drawn.full_tensor().to(expected.dtype), expected), (name, first, second, drawn)
            ends.append(state())
    return ends


def certain_of_all(rank):
    return {(name, first): certain(rank, name, first) for name in CERTAIN for first in SPREAD}


def test_arguments_meet_whatever_their_placements():
    everywhere = gloo(4, certain_of_all)
    assert all(ends == everywhere[0] for ends in everywhere), "ranks end in step"


def whole_rows(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    seen = {}
    torch.manual_seed(0)
    with tdr.install():
        x = distribute_tensor(torch.rand(8, 6) + 1, mesh, [Shard(0), Shard(1)])
        for name, draw in {
            "multinomial": lambda: torch.multinomial(x, 3),
            "dirichlet": lambda: torch._sample_dirichlet(x),
        }.items():
            with CommDebugMode() as comms:
                out = draw()
            assert out.placements == (Shard(0), Replicate())
            seen[name] = (comms.get_total_counts(), out.full_tensor().tolist(), torch.get_rng_state().tolist())
    return seen


def test_a_row_is_made_whole_in_sight():
    first, *others = gloo(4, whole_rows)
    assert all(one == first for one in others)
    assert all(count == 1 for count, _, _ in first.values())
    rows = torch.tensor(first["dirichlet"][1])
    torch.testing.assert_close(rows.sum(1), torch.ones(8))
    assert len({tuple(row) for row in rows.tolist()}) == 8


LEAST = {"multinomial.default": 0, "poisson.default": 4096, "binomial.default": 4096, "bernoulli_.Tensor": 12}


@settings(max_examples=200, deadline=None)
@given(shardings(), st.sampled_from([*LEAST]))
@example(Sharding((5,), (4,), (Shard(0),)), "poisson.default")
@example(Sharding((8, 1), (4,), (Shard(0),)), "multinomial.default")
def test_shards_are_as_far_apart_as_the_row_asks(sharding, name):
    row = next(row for row in _ops.TABLE if row.overload == name)
    mesh = SimpleNamespace(shape=sharding.mesh_shape)
    spec = SimpleNamespace(shape=sharding.shape, placements=sharding.placements, mesh=mesh, tensor_meta=None)
    layout = _dispatch._layout_of(row, spec)
    for coordinate in sharding.plans():
        plan = layout.plan(coordinate)
        # With replacement, multinomial takes 4 a row, and a row may have one category.
        span = LEAST[name] or 4 * sharding.local_numel(coordinate)
        assert plan.start % 4 == plan.end % 4 == 0
        assert span <= layout.step
        assert sharding.local_numel(coordinate) == 0 or plan.start + span <= plan.end


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1))])
@pytest.mark.parametrize("query, key", [((8, 4, 2048, 64), 2048), ((4, 4, 1, 8), 1), ((4, 8, 3, 16), 77)])
def test_attention_has_a_value_for_each_score(placements, query, key):
    mesh = as_rank(0, (2, 2))
    spec = empty(query, device_mesh=mesh, placements=placements)._spec
    layout = _dispatch._attention_layout(spec, torch.Size(query), torch.Size((*query[:2], key, 8)))
    heads = query[0] * query[1] // layout.num_shards
    assert layout.step >= heads * query[2] * key and layout.step >= heads * 32
    assert layout.end >= layout.step * layout.num_shards
    assert layout.step % 4 == 0


def test_a_row_that_is_not_remembered_still_sees_the_region_switched_off(installed):
    import torch.distributed.tensor._random as torch_random

    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(50)
    torch_random._rng_tracker.distribute_region_enabled = False
    try:
        torch.manual_seed(0)
        ours = torch.poisson(x).to_local()
        torch.manual_seed(0)
        assert torch.equal(ours, torch.poisson(x.to_local()))
    finally:
        torch_random._rng_tracker.distribute_region_enabled = True


def test_a_generator_given_by_position(device, installed):
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(50)
    default = default_generator(device)
    before = default.get_state()
    ends = set()
    for pass_it in (lambda g: torch.poisson(x, g), lambda g: torch.poisson(x, generator=g)):
        generator = torch.Generator(device).manual_seed(3)
        pass_it(generator)
        ends.add(generator.get_state().cpu().numpy().tobytes())
    assert len(ends) == 1
    assert torch.equal(before, default.get_state())


def test_the_page_is_current():
    assert ops_page.PAGE.read_text() == ops_page.render(), "run python tests/ops_page.py"


def test_ranks_outside_the_mesh(installed):
    as_rank(3, (4,))
    mesh = DeviceMesh("cpu", [0, 1])
    before = torch.get_rng_state()
    for name, draw in OPS.items():
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(1)])
        out = draw(x, None)
        assert out.shape == (16, 6) and out.to_local().numel() == 0, name
    high = empty((), device_mesh=mesh, placements=[Replicate()])
    assert torch.randint_like(x, high).to_local().numel() == 0
    assert torch.equal(before, torch.get_rng_state())


def test_arguments_that_are_the_schemas_defaults(installed):
    """Torch's dispatch leaves them out."""
    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(2)
    for draw in (lambda: torch.normal(x, 1.0), lambda: torch.normal(x), lambda: torch.normal(x, std=1)):
        torch.manual_seed(0)
        ours = draw().to_local()
        torch.manual_seed(0)
        assert torch.equal(ours, torch.normal(x, torch.ones_like(x)).to_local())
    with pytest.raises(RuntimeError, match="normal expects standard deviation to be non-complex"):
        torch.normal(1.0, x.to(torch.complex64))


def test_the_dtype_is_the_means():
    mesh = as_rank(0, (1,))
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    for mean, std in itertools.product(kinds, kinds):
        for sizes in ((), (3,)), ((3,), ()), ((3,), (3,)):
            plain = [torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, (mean, std))]
            with tdr.install():
                placed = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) if x.ndim else x for x in plain]
                ours = torch.normal(*placed)
            assert ours.dtype == torch.normal(*plain).dtype
            assert ours.to_local().dtype == ours.dtype


def test_plain_tensors_taken_for_replicated_ones(installed):
    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    with implicit_replication():
        assert torch.equal(torch.binomial(torch.full((16, 6), 3.0), x).to_local(), torch.full((4, 6), 3.0))
        assert torch.equal(torch.binomial(x, torch.ones(16, 6)).to_local(), torch.ones(4, 6))
        assert torch.normal(torch.ones(16, 6), x).to_local().shape == (4, 6)
        assert torch.equal(x.bernoulli_(torch.ones(16, 6)).to_local(), torch.ones(4, 6))
        with pytest.raises(RuntimeError, match="got mixed"):
            torch.empty(16, 6).bernoulli_(x)


REFUSED_DTYPES = {  # for a tensor of integers
    "uniform_": lambda x: x.uniform_(),
    "uniform_(3, 2)": lambda x: x.float().uniform_(3, 2),
    "normal_": lambda x: x.normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "exponential_": lambda x: x.exponential_(),
    "rand_like": lambda x: torch.rand_like(x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "bernoulli": lambda x: torch.bernoulli(x),
    "poisson": lambda x: torch.poisson(x),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "binomial": lambda x: torch.binomial(x, x),
    "_standard_gamma": lambda x: torch._standard_gamma(x),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x),
}


@pytest.mark.parametrize("name", REFUSED_DTYPES)
def test_a_rank_whose_shard_is_empty_raises_what_the_others_raise(name, device, installed):
    default = default_generator(device)

    def on_rank(rank, mesh):
        x = empty(2, 6, device_mesh=mesh, placements=[Shard(0)], dtype=torch.int64).fill_(1)
        before = default.get_state()
        errors = []
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                REFUSED_DTYPES[name](x)
            assert torch.equal(before, default.get_state())
            errors.append((type(raised.value), str(raised.value)))
        return errors

    with_elements, _, *empty_ones = each_rank((4,), on_rank, device)
    assert empty_ones == [with_elements] * 2


def test_a_rank_whose_shard_is_empty_raises_in_a_graph_too(installed):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def fill(x):
        return torch.rand_like(x).normal_()

    def on_rank(rank, mesh):
        x = empty(2, 6, device_mesh=mesh, placements=[Shard(0)])
        integers = empty(2, 6, device_mesh=mesh, placements=[Shard(0)], dtype=torch.int64)
        fill(x)
        before = torch.get_rng_state()
        with pytest.raises(Exception, match=r"not implemented for 'Long'|floating-point"):
            torch.compile(lambda x: x.normal_(), backend="aot_eager", fullgraph=True)(integers)
        assert torch.equal(before, torch.get_rng_state())

    each_rank((4,), on_rank)


def test_an_empty_shards_mask_is_a_mask(device, installed):
    mesh = as_rank(3, (4,), device)
    x = empty(2, 6, device_mesh=mesh, placements=[Shard(0)])
    out, mask = torch.native_dropout(x, 0.5, True)
    assert (mask.dtype, mask.to_local().dtype, out.to_local().dtype) == (torch.bool, torch.bool, torch.float32)


@pytest.mark.parametrize("name", ["_standard_gamma", "_sample_dirichlet"])
def test_gradients_of_gamma_and_dirichlet(name, device, installed):
    def on_rank(rank, mesh):
        torch.manual_seed(7)
        whole = torch.rand(8, 6, device=device) + 0.5
        weight = torch.rand(8, 6, device=device)
        rows = slice(2 * rank, 2 * rank + 2)
        x = DTensor.from_local(whole[rows], mesh, [Shard(0)], run_check=False).requires_grad_()
        w = DTensor.from_local(weight[rows], mesh, [Shard(0)], run_check=False)
        if name == "_standard_gamma":
            out = torch.distributions.Gamma(x, torch.ones_like(x), validate_args=False).rsample()
        else:
            out = torch.distributions.Dirichlet(x, validate_args=False).rsample()
        (out * w).to_local().sum().backward()
        # The derivative of what was drawn, by torch's own formula on plain tensors.
        drawn, alpha, w = out.detach().to_local(), whole[rows], weight[rows]
        if name == "_standard_gamma":
            expected = torch._standard_gamma_grad(alpha, drawn) * w
        else:
            total = alpha.sum(-1, True).expand_as(alpha)
            expected = torch._dirichlet_grad(drawn, alpha, total) * (w - (drawn * w).sum(-1, True))
        assert x.grad.placements == (Shard(0),)
        torch.testing.assert_close(x.grad.to_local(), expected)

    each_rank((4,), on_rank, device)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_attention_on_the_cpu_without_dropout_is_torchs(placement):
    mesh = as_rank(1, (2,))
    q = distribute_tensor(torch.rand(4, 4, 6, 8), mesh, [placement], src_data_rank=None)
    try:
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except NotImplementedError:  # torch 2.11
        pytest.skip("torch has no rule for it")
    with tdr.install():
        ours = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(ours.to_local(), expected.to_local()) and ours.placements == expected.placements


def test_an_expanded_tensor_is_refused_on_all_ranks(device, installed):
    default = default_generator(device)

    def on_rank(rank, mesh):
        x = empty(3, 1, device_mesh=mesh, placements=[Shard(0)]).expand(3, 8)
        p = empty(3, 8, device_mesh=mesh, placements=[Shard(0)]).fill_(0.5)
        for draw in (x.normal_, lambda: x.bernoulli_(0.5), lambda: x.bernoulli_(p)):
            before = default.get_state()
            with pytest.raises(RuntimeError, match="unsupported operation: more than one element"):
                draw()
            assert torch.equal(before, default.get_state())

    each_rank((4,), on_rank, device)


def test_two_meshes_are_refused_before_anything_moves(installed):
    as_rank(0, (4,))
    x, y = (
        empty(8, 6, device_mesh=init_device_mesh("cpu", shape), placements=[Shard(0)] * len(shape)).fill_(1)
        for shape in ((4,), (2, 2))
    )
    for draw in (
        lambda: torch.normal(x, y),
        lambda: torch.binomial(x, y),
        lambda: x.bernoulli_(y),
        lambda: aten.bernoulli.Tensor(x, y),
    ):
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match=r"aten.*: got DTensors on different meshes, .* bring them to one mesh"):
            draw()
        assert torch.equal(before, torch.get_rng_state())


def test_probabilities_in_another_order_of_memory(device, installed):
    x, p = torch.zeros(8, 16, device=device), torch.full((8, 16), 0.5, device=device)
    torch.manual_seed(0)
    expected = x.clone().t().bernoulli_(p.t())
    mesh = as_rank(1, (2,), device)
    torch.manual_seed(0)
    ours = DTensor.from_local(x, mesh, [Replicate()], run_check=False).t()
    ours.bernoulli_(DTensor.from_local(p, mesh, [Replicate()], run_check=False).t())
    assert torch.equal(ours.to_local(), expected)


def test_gradients_of_rrelu(device, installed):
    def on_rank(rank, mesh):
        whole = torch.linspace(-1, 1, 48, device=device).reshape(8, 6)
        x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        out = torch.nn.functional.rrelu(x, 0.1, 0.9, True)
        out.backward(DTensor.from_local(torch.ones(2, 6, device=device), mesh, [Shard(0)], run_check=False))
        local = x.detach().to_local()
        slope = torch.where(local < 0, out.detach().to_local() / local, torch.ones_like(local))
        torch.testing.assert_close(x.grad.to_local(), slope)

    each_rank((4,), on_rank, device)


@pytest.mark.parametrize("name", OPS)
def test_strides_are_the_plain_calls(name, installed):
    mesh = as_rank(0, (1,))
    for plain in (torch.ones(6, 8).t(), torch.ones(1, 8).expand(6, 8), torch.ones(12, 16)[::2, ::2]):
        in_place = any(one.endswith("_") for one in OPS[name].__code__.co_names)
        if in_place and plain.stride(0) == 0:
            continue
        x = DTensor.from_local(plain, mesh, [Replicate()], run_check=False, shape=plain.shape, stride=plain.stride())
        ours, expected = OPS[name](x, None), OPS[name](plain.clone() if in_place else plain, None)
        assert ours.stride() == ours.to_local().stride(), (plain.stride(), ours.to_local().stride())
        assert ours.stride() == expected.stride() or in_place
