"""Random ops on DTensors inside what torch puts around ops: grad modes, autocast, deterministic algorithms, local_map,
autograd, activation checkpoints and optimizers."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_attention import check_shards
from test_semantics import OPS, placed, shard_key, state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.distributed.tensor.experimental import local_map
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from worlds import as_rank, default_generator, each_rank, gloo

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _ops


@contextlib.contextmanager
def deterministic(device):
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # On CUDA some have no deterministic form: multinomial sums probabilities up.
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


MODES = {
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "deterministic": deterministic,
}
COMPUTES_IN = {"autocast": torch.bfloat16}
# What torch decomposes outside of inference_mode, beyond OPS.
COMPOSITES = {
    "dropout_": lambda x, g: F.dropout(x.fill_(1.0), inplace=True),
    "alpha_dropout_": lambda x, g: F.alpha_dropout(x.fill_(1.0), 0.5, True, inplace=True),
    "feature_dropout": lambda x, g: torch.feature_dropout(x.fill_(1.0), 0.5, True),
    "feature_dropout_": lambda x, g: torch.feature_dropout_(x.fill_(1.0), 0.5, True),
    "feature_alpha_dropout": lambda x, g: torch.feature_alpha_dropout(x.fill_(1.0), 0.5, True),
    "feature_alpha_dropout_": lambda x, g: torch.feature_alpha_dropout_(x.fill_(1.0), 0.5, True),
    "rrelu_": lambda x, g: torch.rrelu_(x.fill_(-1.0), 0.1, 0.9, True, g),
}
DRAWS = OPS | COMPOSITES


def backward_of_the_sum(out):
    """As ``out.sum().backward()``, which hands down a ``Replicate`` gradient: torch then places the gradients of the inputs
    as it likes, and communicates for it."""
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAWS)
def test_a_mode_changes_nothing(name, mode, device, installed):
    op = DRAWS[name]
    placements = placed(name, [Replicate(), Shard(0)])

    def on_rank(rank, mesh):
        def new():
            return empty(16, 6, device_mesh=mesh, placements=placements)

        def draw(made_before):
            torch.manual_seed(7)
            drawn = [op(x, None).to_local().clone() for x in (made_before, new())]
            return torch.stack(drawn), state(default_generator(device))

        expected, end = draw(new())
        made_before = new()
        with MODES[mode](device):
            values, end_in_mode = draw(made_before)
        assert torch.equal(values, expected)
        assert end_in_mode == end
        return shard_key(mesh, placements), values, end

    check_shards(each_rank((2, 2), on_rank, device))


def test_what_reaches_dtensor_whole_under_inference_mode(installed, monkeypatch):
    """So that the test above, and the one of attention, run every decomposition of the package."""
    reached = set()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for overload in _ops.DECOMPOSED:
        op = _ops.overload(overload)

        def spy(op, args, kwargs, overload=overload, handler=handlers[op]):
            reached.add(overload)
            return handler(op, args, kwargs)

        monkeypatch.setitem(handlers, op, spy)
    mesh = as_rank(1, (4,))
    with torch.inference_mode():
        for op in DRAWS.values():
            op(empty(16, 6, device_mesh=mesh, placements=[Shard(0)]), None)
        query = empty(4, 2, 8, 8, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert reached == set(_ops.DECOMPOSED)


# ---------------------------------------------------------------------------------------------------------------------
# local_map
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [False, True], ids=["default", "generator="])
@pytest.mark.parametrize("name", OPS)
def test_random_ops_in_local_map_are_plain(name, passed, device, installed):
    """Plain, and in line on the same generator with the DTensor ops around them."""
    op = OPS[name]

    def on_rank(rank, mesh):
        def between_dtensor_ops(middle):
            torch.manual_seed(7)
            generator = torch.Generator(device).manual_seed(8) if passed else None
            dtensor = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
            before = dtensor.normal_(generator=generator).to_local().clone()
            drawn = middle(dtensor, generator)
            after = dtensor.normal_(generator=generator).to_local().clone()
            return before, drawn, after

        def mapped(dtensor, generator):
            on_local = local_map(
                lambda local: op(local, generator),
                out_placements=[Shard(0)],
                in_placements=([Shard(0)],),
                device_mesh=mesh,
            )
            return on_local(dtensor).to_local().clone()

        def plain(dtensor, generator):
            return op(torch.empty(4, 6, device=device), generator)

        ours, expected = between_dtensor_ops(mapped), between_dtensor_ops(plain)
        assert all(map(torch.equal, ours, expected))
        return ours

    ranks = each_rank((4,), on_rank, device)
    before, drawn, after = zip(*ranks)
    assert all(torch.equal(one, drawn[0]) for one in drawn), "every rank draws the plain numbers"
    for shards in (before, after):
        assert not any(itertools.starmap(torch.equal, itertools.combinations(shards, 2)))


# ---------------------------------------------------------------------------------------------------------------------
# Attention on the math path. Query and key are zeros, so that every score is 1 / length; the values are the identity,
# so that the output is the matrix of what was kept.
# ---------------------------------------------------------------------------------------------------------------------

LENGTH = 16
ATTENTION = {
    "batch": ((4,), (Shard(0),)),
    "heads": ((4,), (Shard(1),)),
    "batch and heads": ((2, 2), (Shard(0), Shard(1))),
    "heads and batch": ((2, 2), (Shard(1), Shard(0))),
    "batch twice": ((2, 2), (Shard(0), Shard(0))),
    "batch, replicas": ((2, 2), (Shard(0), Replicate())),
    "heads, replicas": ((2, 2), (Replicate(), Shard(1))),
}


def query_and_value(mesh, placements, dtype=torch.float32):
    where = {"device_mesh": mesh, "placements": placements, "dtype": dtype}
    query = empty(4, 4, LENGTH, LENGTH, **where).fill_(0)
    value = empty(4, 4, LENGTH, LENGTH, **where)
    local = value.to_local()
    local.copy_(torch.eye(LENGTH, dtype=dtype, device=local.device).expand_as(local))
    return query, value


def attention(query, value):
    with sdpa_kernel(SDPBackend.MATH):
        try:
            return F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
        except RuntimeError as error:
            if "Attempted to flatten multiple dimensions" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} has no rule to flatten a batch whose heads are sharded")


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_drops_the_same_scores_forward_and_backward(case, device, installed):
    mesh_shape, placements = ATTENTION[case]

    def on_rank(rank, mesh):
        query, value = query_and_value(mesh, placements)
        value.requires_grad_()
        torch.manual_seed(3)
        out = attention(query, value)
        assert out.placements == placements
        end = state(default_generator(device))
        kept = out.to_local().detach().clone()
        assert set(kept.unique().tolist()) == {0.0, 2 / LENGTH}
        assert 0.4 < kept.ne(0).double().mean() < 0.6
        backward_of_the_sum(out)
        assert state(default_generator(device)) == end, "the backward pass draws nothing"
        assert value.grad.placements == placements
        gradient = value.grad.to_local()
        assert torch.equal(gradient, kept.sum(-2).unsqueeze(-1).expand_as(gradient))
        return shard_key(mesh, placements), kept, end

    check_shards(each_rank(mesh_shape, on_rank, device))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ATTENTION)
def test_a_mode_changes_nothing_in_attention(case, mode, device, installed):
    mesh_shape, placements = ATTENTION[case]
    if mode == "inference_mode" and Shard(1) in placements:
        pytest.skip("torch redistributes the heads there; another test does, between processes")

    def on_rank(rank, mesh):
        torch.manual_seed(3)
        expected = attention(*query_and_value(mesh, placements, COMPUTES_IN.get(mode, torch.float32))).to_local()
        end = state(default_generator(device))
        torch.manual_seed(3)
        with MODES[mode](device):
            kept = attention(*query_and_value(mesh, placements)).to_local()
        assert torch.equal(kept, expected)
        assert state(default_generator(device)) == end
        return shard_key(mesh, placements), kept, end

    check_shards(each_rank(mesh_shape, on_rank, device))


def attention_in_inference_mode(rank):
    mesh = init_device_mesh("cpu", (2,))
    with tdr.install(), torch.inference_mode():
        query, value = query_and_value(mesh, [Shard(1)])
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
        return out.full_tensor().tolist(), state(torch.default_generator)


def test_attention_on_sharded_heads_in_inference_mode():
    first, second = gloo(2, attention_in_inference_mode)
    assert first == second
    kept = torch.tensor(first[0])
    assert set(kept.unique().tolist()) == {0.0, 2 / LENGTH}
    rows = kept.flatten(0, 2)
    assert len(rows.unique(dim=0)) > 0.99 * len(rows), "two of 16 scores are seldom dropped alike"


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------

# What alpha_dropout multiplies with what it keeps (_alpha_dropout in ATen/native/Dropout.cpp), for p = 0.5.
KEPT = ((1.7580993408473766**2 * 0.5 + 1) * 0.5) ** -0.5
# The op, the input that it is given everywhere, and the gradient of the output's sum, as the output shows it.
DIFFERENTIABLE = {
    "dropout": (lambda x: F.dropout(x, 0.5), 1.0, lambda out: out),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], 1.0, lambda out: out),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), 1.0, lambda out: out),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, True), 1.0, lambda out: KEPT * (out > 0)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, True), 1.0, lambda out: KEPT * (out > 0)),
    "rrelu": (lambda x: F.rrelu(x, 0.1, 0.9, True), -1.0, lambda out: -out),
}
AUTOGRAD = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "one dim twice": ((2, 2), (Shard(0), Shard(0))),
    "replicas": ((2, 2), (Replicate(), Shard(1))),
}


@pytest.mark.parametrize("case", AUTOGRAD)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_backward_pass_uses_the_noise_of_the_forward_pass(name, case, device, installed):
    op, fill, gradient_shown_by = DIFFERENTIABLE[name]
    mesh_shape, placements = AUTOGRAD[case]

    def on_rank(rank, mesh):
        x = empty(8, 16, 5, device_mesh=mesh, placements=placements).fill_(fill).requires_grad_()
        torch.manual_seed(3)
        out = op(x)
        assert out.placements == placements
        end = state(default_generator(device))
        backward_of_the_sum(out)
        assert state(default_generator(device)) == end, "the backward pass draws nothing"
        assert x.grad.placements == placements
        gradient = x.grad.to_local()
        torch.testing.assert_close(gradient, gradient_shown_by(out.to_local().detach()))
        assert gradient.unique().numel() > 1
        return shard_key(mesh, placements), gradient, end

    check_shards(each_rank(mesh_shape, on_rank, device))


@pytest.mark.parametrize("case", AUTOGRAD)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_gradients_flow_through_gumbel_softmax(hard, case, device, installed):
    mesh_shape, placements = AUTOGRAD[case]

    def on_rank(rank, mesh):
        def new():
            return empty(8, 16, 5, device_mesh=mesh, placements=placements)

        torch.manual_seed(3)
        logits, weights = new().normal_().requires_grad_(), new().normal_()
        before = default_generator(device).get_state()
        try:
            out = F.gumbel_softmax(logits, tau=0.5, hard=hard)
        except RuntimeError as error:
            if not hard or "aten.scatter_.value" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} cannot scatter into a sharded DTensor, as hard=True does")
        end = state(default_generator(device))
        out.backward(weights)
        assert state(default_generator(device)) == end, "the backward pass draws nothing"
        default_generator(device).set_state(before)
        soft = F.gumbel_softmax(logits.detach(), tau=0.5).to_local()
        w = weights.to_local()
        expected = soft * (w - (soft * w).sum(-1, keepdim=True)) / 0.5
        torch.testing.assert_close(logits.grad.to_local(), expected)
        assert bool(expected.ne(0).any())
        return shard_key(mesh, placements), out.to_local().detach(), end

    check_shards(each_rank(mesh_shape, on_rank, device))


@pytest.mark.parametrize("case", AUTOGRAD)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_draws_its_masks_again(use_reentrant, case, device, installed):
    mesh_shape, placements = AUTOGRAD[case]
    runs = []

    def block(x, weight):
        runs.append(None)
        return F.alpha_dropout(F.dropout(torch.sin(F.dropout(x * weight)), 0.3), 0.2, True)

    def train(mesh, call):
        torch.manual_seed(3)
        x, weight = (
            empty(16, 16, device_mesh=mesh, placements=placements).uniform_(1, 2).requires_grad_() for _ in range(2)
        )
        out = call(call(x, weight), weight)
        end = state(default_generator(device))
        F.dropout(out)  # so that the backward pass starts from yet another state
        backward_of_the_sum(out)
        values = [one.to_local() for one in (out.detach(), x.grad, weight.grad)]
        return torch.stack(values), end, state(default_generator(device))

    def on_rank(rank, mesh):
        expected, end, last = train(mesh, block)
        assert len(runs) == 2
        values, *ends = train(mesh, lambda *args: checkpoint(block, *args, use_reentrant=use_reentrant))
        assert len(runs) == 6, "each block has run once more"
        runs.clear()
        assert torch.equal(values, expected)
        assert ends == [end, last]
        return shard_key(mesh, placements), values, last

    check_shards(each_rank(mesh_shape, on_rank, device))


# ---------------------------------------------------------------------------------------------------------------------
# An optimizer that keeps bfloat16 parameters and rounds them stochastically.
# ---------------------------------------------------------------------------------------------------------------------


def stochastically_rounded(exact):
    """A bfloat16 neighbour of each float32, the nearer the likelier: noise is added below bfloat16's bits, and cut."""
    bits = exact.view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                kept = self.state[param]
                if not kept:
                    kept["step"] = 0
                    kept["mean"] = torch.zeros_like(param, dtype=torch.float32)
                    kept["square"] = torch.zeros_like(param, dtype=torch.float32)
                kept["step"] += 1
                gradient = param.grad.float()
                mean = kept["mean"].lerp_(gradient, 1 - beta1)
                square = kept["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (square / (1 - beta2 ** kept["step"])).sqrt_().add_(group["eps"])
                exact = param.float().mul_(1 - lr * group["weight_decay"])
                exact.addcdiv_(mean, root, value=-lr / (1 - beta1 ** kept["step"]))
                param.copy_(stochastically_rounded(exact))


PLACEMENTS = {
    "rows": ((4,), (Shard(0),)),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
}


def within_five_standard_errors(results, expected, deviation=None):
    """Whether the mean over all shards is the expected one. Their deviation is the sample's, if none is given."""
    shards = {at: values for at, values, _ in results}
    values = torch.cat([one.flatten() for one in shards.values()]).double()
    assert values.numel() >= 100_000
    deviation = values.std() if deviation is None else deviation
    return abs(values.mean() - expected) < 5 * deviation / values.numel() ** 0.5


@pytest.mark.parametrize("low, high", [(1.0, 1.0 + 2**-7), (-2.0, -2.0 - 2**-6)])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_stochastic_rounding_is_unbiased(case, low, high, device, installed):
    mesh_shape, placements = PLACEMENTS[case]
    exact = low + (high - low) / 4

    def on_rank(rank, mesh):
        torch.manual_seed(3)
        rounded = stochastically_rounded(empty(512, 256, device_mesh=mesh, placements=placements).fill_(exact))
        assert rounded.dtype == torch.bfloat16 and rounded.placements == placements
        values = rounded.to_local().float()
        assert set(values.unique().tolist()) == {low, high}
        return shard_key(mesh, placements), values, state(default_generator(device))

    results = each_rank(mesh_shape, on_rank, device)
    check_shards(results)
    assert within_five_standard_errors(results, exact, abs(high - low) * (3 / 16) ** 0.5)


@pytest.mark.parametrize("case", PLACEMENTS)
def test_adamw_with_stochastic_rounding(case, device, installed):
    """Steps that the nearest bfloat16 would lose move the mean as torch's AdamW moves a float32. The gradients don't
    depend on the parameters, so that a step is linear in them and keeps the mean."""
    mesh_shape, placements = PLACEMENTS[case]
    arguments = {"lr": 3e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    gradients = [1.0, -0.25, 0.5, 1.0]

    def train(param, optimizer):
        for gradient in gradients:
            param.grad = torch.full_like(param, gradient)
            optimizer.step()
        return param.detach()

    exact = torch.nn.Parameter(torch.ones((), device=device))
    expected = train(exact, torch.optim.AdamW([exact], **arguments)).item()

    def on_rank(rank, mesh):
        torch.manual_seed(3)
        where = {"device_mesh": mesh, "placements": placements, "dtype": torch.bfloat16}
        param = torch.nn.Parameter(empty(512, 256, **where).fill_(1.0))
        values = train(param, StochasticAdamW([param], **arguments)).to_local()
        assert values.dtype == torch.bfloat16
        return shard_key(mesh, placements), values, state(default_generator(device))

    results = each_rank(mesh_shape, on_rank, device)
    check_shards(results)
    assert torch.tensor(expected).bfloat16() == 1.0, "the nearest bfloat16 loses the steps"
    assert within_five_standard_errors(results, expected)
