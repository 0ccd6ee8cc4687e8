"""What a random op on a DTensor promises, whatever the device; also run with ``_random.py`` in torch's own place."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import IN_TREE
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import as_rank, default_generator, each_rank

aten = torch.ops.aten

# name -> op(x, generator or None); each returns the drawn DTensor.
OPS: dict[str, Any] = {
    "uniform_": lambda x, g: x.uniform_(-1, 3, generator=g),
    "normal_": lambda x, g: x.normal_(1, 2, generator=g),
    "bernoulli_": lambda x, g: x.bernoulli_(0.5, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x.fill_(0.5), generator=g),
    "native_dropout": lambda x, g: torch.native_dropout(x.fill_(1.0), 0.5, True)[0],
    "rand_like": lambda x, g: torch.rand_like(x) if g is None else torch.rand_like(x, generator=g),
    "randn_like": lambda x, g: torch.randn_like(x) if g is None else torch.randn_like(x, generator=g),
    "randint_like": lambda x, g: torch.randint_like(x, 1000) if g is None else torch.randint_like(x, 1000, generator=g),
    "randint_like_low": lambda x, g: (
        torch.randint_like(x, 3, 1000) if g is None else torch.randint_like(x, 3, 1000, generator=g)
    ),
    "random_": lambda x, g: x.random_(3, 1000, generator=g),
    "random_to": lambda x, g: x.random_(1000, generator=g),
    "random_default": lambda x, g: x.random_(generator=g),
    "exponential_": lambda x, g: x.exponential_(generator=g),
    "geometric_": lambda x, g: x.geometric_(0.01, generator=g),
    "log_normal_": lambda x, g: x.log_normal_(generator=g),
    "cauchy_": lambda x, g: x.cauchy_(generator=g),
    "bernoulli_p": lambda x, g: torch.bernoulli(x, 0.5, generator=g),
    "uniform": lambda x, g: aten.uniform.default(x, -1.0, 3.0, generator=g),
    "normal_functional": lambda x, g: aten.normal_functional.default(x, 1.0, 2.0, generator=g),
    "log_normal": lambda x, g: aten.log_normal.default(x, generator=g),
    "exponential": lambda x, g: aten.exponential.default(x, generator=g),
    "cauchy": lambda x, g: aten.cauchy.default(x, generator=g),
    "geometric": lambda x, g: aten.geometric.default(x, 0.01, generator=g),
    "random": lambda x, g: aten.random.default(x, generator=g),
    "random.to": lambda x, g: aten.random.to(x, 1000, generator=g),
    "random.from": lambda x, g: getattr(aten.random, "from")(x, 3, 1000, generator=g),
    "poisson": lambda x, g: torch.poisson(x.fill_(50.0), generator=g),
    "binomial": lambda x, g: torch.binomial(x.fill_(1000.0), torch.full_like(x, 0.3), generator=g),
    "_standard_gamma": lambda x, g: torch._standard_gamma(x.fill_(2.0), generator=g),
    "_sample_dirichlet": lambda x, g: torch._sample_dirichlet(x.fill_(2.0), generator=g),
    "multinomial": lambda x, g: torch.multinomial(x.fill_(1.0), x.shape[-1], generator=g),
    "multinomial_with": lambda x, g: torch.multinomial(x.fill_(1.0), x.shape[-1], True, generator=g),
    "rrelu_with_noise": lambda x, g: aten.rrelu_with_noise(x.fill_(-1.0), torch.empty_like(x), 0.1, 0.9, True, g),
    "rrelu_with_noise_": lambda x, g: aten.rrelu_with_noise_(x.fill_(-1.0), torch.empty_like(x), 0.1, 0.9, True, g),
    "rrelu_with_noise_functional": lambda x, g: aten.rrelu_with_noise_functional(
        x.fill_(-1.0), torch.empty_like(x), 0.1, 0.9, True, g
    )[0],
    "normal_tensors": lambda x, g: torch.normal(x.fill_(1.0), torch.full_like(x, 2.0), generator=g),
    "normal_mean_tensor": lambda x, g: torch.normal(x.fill_(1.0), 2.0, generator=g),
    "normal_std_tensor": lambda x, g: torch.normal(1.0, x.fill_(2.0), generator=g),
    "bernoulli_tensor_": lambda x, g: x.bernoulli_(torch.full_like(x, 0.5), generator=g),
    "bernoulli_tensor": lambda x, g: aten.bernoulli.Tensor(x, torch.full_like(x, 0.5), generator=g),
    "randint_like_tensor": lambda x, g: (
        torch.randint_like(x, torch.tensor(1000))
        if g is None
        else torch.randint_like(x, torch.tensor(1000), generator=g)
    ),
    "dropout": lambda x, g: F.dropout(x.fill_(1.0)),
    "alpha_dropout": lambda x, g: F.alpha_dropout(x.fill_(1.0), 0.5, True),
    "rrelu": lambda x, g: torch.rrelu(x.fill_(-1.0), 0.1, 0.9, True, g),
    "gumbel_softmax": lambda x, g: F.gumbel_softmax(x.fill_(1.0)),
}
TAKE_NO_GENERATOR = {"native_dropout", "dropout", "alpha_dropout", "gumbel_softmax"}
# These look at a whole row at once, and so leave the last dim of what they return whole.
OF_ROWS = {"_sample_dirichlet", "multinomial", "multinomial_with", "gumbel_softmax"}
# Those that torch's own dispatch takes for random, and has a sharding rule for, on all of torch 2.11 to 2.15.
IN_TREE_OPS = ["uniform_", "normal_", "bernoulli_", "bernoulli", "native_dropout", "rand_like", "randn_like"]
IN_TREE_OPS += ["randint_like", "randint_like_low"]
IN_TREE_TAKE_NO_GENERATOR = {"native_dropout", "rand_like", "randn_like", "randint_like", "randint_like_low"}
NAMES = IN_TREE_OPS if IN_TREE else list(OPS)

# mesh shape, placements, global shape
CASES = {
    "even": ((4,), [Shard(0)], (16, 6)),
    "uneven": ((4,), [Shard(0)], (10, 6)),
    "with empty shards": ((8,), [Shard(0)], (5, 8)),
    "columns": ((4,), [Shard(1)], (6, 16)),
    "replicas": ((2, 2), [Replicate(), Shard(0)], (16, 6)),
    "two dims, uneven": ((2, 3), [Shard(0), Shard(1)], (9, 25)),
    "one dim twice": ((2, 2), [Shard(0), Shard(0)], (32, 4)),
    "three mesh dims": ((2, 2, 2), [Shard(1), Replicate(), Shard(0)], (8, 16)),
}


def takes_generator(name: str) -> bool:
    return name not in (IN_TREE_TAKE_NO_GENERATOR if IN_TREE else TAKE_NO_GENERATOR)


def placed(name: str, placements: Any, ndim: int = 2) -> tuple[Any, ...]:
    """The placements of what the op returns."""
    if name not in OF_ROWS:
        return tuple(placements)
    return tuple(Replicate() if one == Shard(ndim - 1) else one for one in placements)


def shard_key(mesh: Any, placements: Any) -> tuple[int, ...]:
    """The coordinates that tell shards apart, and replicas not."""
    return tuple(c for c, placement in zip(mesh.get_coordinate(), placements) if isinstance(placement, Shard))


def state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_shards_replicas_and_states(name, case, device, installed):
    mesh_shape, placements, shape = CASES[case]
    placements = placed(name, placements)  # a fake process group gathers nothing
    op = OPS[name]

    def on_rank(rank, mesh):
        x = empty(shape, device_mesh=mesh, placements=placements)
        torch.manual_seed(1234)
        default = default_generator(device)
        seeded = state(default)
        out = op(x, None)
        assert isinstance(out, DTensor) and out.shape == shape and out.placements == placements
        first = out.to_local().clone()
        after_first = state(default)
        second = op(x, None).to_local().clone()
        after_second = state(default)
        torch.manual_seed(1234)
        again = op(x, None).to_local().clone()
        assert torch.equal(first, again), "reseeding repeats"
        assert state(default) == after_first
        if first.numel() >= 8:
            assert not torch.equal(first, second), "a second op draws other numbers"
        assert seeded != after_first != after_second, "the generator advances in sight"
        if takes_generator(name):
            generator = torch.Generator(device).manual_seed(1234)
            assert torch.equal(op(x, generator).to_local(), first), "a passed generator gives the default's values"
            assert state(generator) == after_first, "and advances like it"
            assert state(default) == after_first, "and the default one is left alone"
        return shard_key(mesh, placements), first, after_first, after_second

    results = each_rank(mesh_shape, on_rank, device)
    assert len({(first, second) for _, _, first, second in results}) == 1, "all ranks end in the same state"
    shards: dict[Any, torch.Tensor] = {}
    for key, values, _, _ in results:
        assert torch.equal(shards.setdefault(key, values), values), "replicas agree"
    distinct = [tuple(values.flatten().tolist()) for values in shards.values() if values.numel() >= 8]
    assert len(set(distinct)) == len(distinct), "shards differ"


@pytest.mark.parametrize("name", NAMES)
def test_replicated_draws_what_the_plain_call_draws(name, device, installed):
    op = OPS[name]

    def on_rank(rank, mesh):
        torch.manual_seed(5)
        ours = op(empty(16, 6, device_mesh=mesh, placements=[Replicate()] * mesh.ndim), None).to_local()
        end = state(default_generator(device))
        torch.manual_seed(5)
        plain = op(torch.empty(16, 6, device=device), None)
        assert torch.equal(ours, plain)
        if device == "cpu":
            assert end == state(default_generator(device))
        return end

    assert len(set(each_rank((2, 2), on_rank, device))) == 1
    each_rank((1,), on_rank, device)


@pytest.mark.parametrize("name", NAMES)
def test_mesh_of_one_rank_draws_what_the_plain_call_draws(name, device, installed):
    mesh = as_rank(0, (1,), device)
    torch.manual_seed(5)
    ours = OPS[name](empty(16, 6, device_mesh=mesh, placements=[Shard(0)]), None).to_local()
    torch.manual_seed(5)
    assert torch.equal(ours, OPS[name](torch.empty(16, 6, device=device), None))


def test_replicate_then_shard_then_replicate(device, installed):
    def on_rank(rank, mesh):
        torch.manual_seed(0)
        ends = []
        for placements in ([Replicate()], [Shard(0)], [Replicate()], [Shard(1)]):
            empty(7, 9, device_mesh=mesh, placements=placements).uniform_()
            ends.append(state(default_generator(device)))
        return tuple(ends)

    assert len(set(each_rank((4,), on_rank, device))) == 1


def test_the_advance_does_not_depend_on_the_mesh_or_the_rank_on_the_cpu(installed):
    def on_rank(rank, mesh):
        torch.manual_seed(0)
        empty(12, 8, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim).normal_()
        return state(torch.default_generator)

    ends = {end for mesh_shape in ((2,), (5,), (2, 3)) for end in each_rank(mesh_shape, on_rank)}
    assert len(ends) == 1
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # one 64-bit draw
    assert ends == {state(torch.default_generator)}


def test_reads_the_generator_as_it_is_now(device, installed):
    """A plain op between two DTensor ops moves the second, and a DTensor op moves a plain one."""
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])

    def draw(between):
        torch.manual_seed(0)
        x.uniform_()
        if between:
            torch.rand(3, device=device)
        return x.uniform_().to_local().clone()

    assert not torch.equal(draw(False), draw(True))
    torch.manual_seed(0)
    plain = torch.rand(3, device=device)
    torch.manual_seed(0)
    x.uniform_()
    assert not torch.equal(plain, torch.rand(3, device=device))


def test_a_disabled_region_runs_the_op_locally_untouched(device, installed):
    import torch.distributed.tensor._random as torch_random

    def on_rank(rank, mesh):
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
        x.uniform_()
        tracker = torch_random._rng_tracker
        tracker.distribute_region_enabled = False
        try:
            torch.manual_seed(0)
            ours = torch.randn_like(x.uniform_()).to_local()
            end = state(default_generator(device))
        finally:
            tracker.distribute_region_enabled = True
        torch.manual_seed(0)
        assert torch.equal(ours, torch.randn_like(torch.empty(4, 6, device=device).uniform_()))
        assert end == state(default_generator(device))

    each_rank((4,), on_rank, device)


class RaiseAfter(TorchDispatchMode):
    """Lets ``op`` on the local tensor draw, and then raises."""

    def __init__(self, op: Any, error: BaseException):
        super().__init__()
        self.op, self.error, self.raised = op, error, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func in self.op and not args[0].is_meta:
            self.raised = True
            raise self.error
        return out


aten = torch.ops.aten
DRAWS = {
    "uniform_": [aten.uniform_.default],
    "randn_like": [aten.randn_like.default, aten.randn_like.generator],
    "native_dropout": [aten.native_dropout.default, aten.bernoulli_.float],
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replicate"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", DRAWS)
def test_an_exception_in_the_middle_leaves_the_generator_where_it_was(name, error, placement, device, installed):
    op = OPS[name]
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[placement])
    op(x, None)
    generators = [default_generator(device)]
    if takes_generator(name):
        generators.append(torch.Generator(device).manual_seed(3))
    for generator in generators:
        torch.manual_seed(3)
        passed = None if generator is generators[0] else generator
        before = [state(one) for one in generators]
        with pytest.raises(error), RaiseAfter(DRAWS[name], error()) as mode:
            op(x, passed)
        assert mode.raised
        assert [state(one) for one in generators] == before
        retry = op(x, passed).to_local().clone()
        torch.manual_seed(3)
        assert torch.equal(retry, op(x, None).to_local()), "a retry draws the same numbers"


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replicate"])
def test_a_bad_argument_leaves_the_generator_where_it_was(placement, device, installed):
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[placement])
    default, passed = default_generator(device), torch.Generator(device).manual_seed(3)
    x.uniform_()
    before = state(default), state(passed)
    for generator in (None, passed):
        with pytest.raises(RuntimeError, match="uniform_ expects to return a"):
            x.uniform_(2.0, 1.0, generator=generator)
        with pytest.raises(RuntimeError, match=r"normal expects std >= 0\.0"):
            x.normal_(0.0, -1.0, generator=generator)
        assert (state(default), state(passed)) == before


@pytest.mark.skipif(IN_TREE, reason="torch's dispatcher works out the outputs first, too, and differently")
def test_outputs_that_cannot_be_worked_out_leave_the_generator_where_it_was(device, installed):
    """The shapes are worked out on the meta device, whose native_dropout refuses complex numbers."""
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, dtype=torch.complex64, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    before = state(default_generator(device))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.native_dropout(x, 0.5, True)
        assert state(default_generator(device)) == before


def test_a_generator_of_another_device_type_is_refused(device, installed):
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(7)
    torch.manual_seed(0)
    default = default_generator(device)
    before = state(default)
    if device == "cpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no generator of another device type")
        generator = torch.Generator("cuda")
    else:
        generator = torch.Generator("cpu")
    theirs = state(generator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"Expected a '{device}' device type for generator but found"):
            x.uniform_(generator=generator)
    assert (state(default), state(generator)) == (before, theirs)
    assert bool((x.to_local() == 7).all())


@pytest.mark.parametrize("name", NAMES)
def test_no_communication(name, device, installed):
    mesh = as_rank(1, (2, 2), device)
    with CommDebugMode() as comms:
        OPS[name](empty(16, 6, device_mesh=mesh, placements=placed(name, [Shard(0), Shard(1)])), None)
    assert comms.get_total_counts() == 0


def test_no_grad_and_grad_are_kept(device, installed):
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    with torch.no_grad():
        x.uniform_()
    assert x.requires_grad and x.is_leaf
    assert not torch.rand_like(x).requires_grad
    out, mask = torch.native_dropout(x, 0.5, True)
    assert out.requires_grad
    out.sum().backward()
    expected = mask.to_local().to(x.dtype) * 2
    assert torch.equal(x.grad.to_local(), expected)


def test_a_zero_sized_tensor(device, installed):
    def on_rank(rank, mesh):
        torch.manual_seed(0)
        x = empty(0, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_()
        assert x.shape == (0, 6)
        return state(default_generator(device))

    assert len(set(each_rank((4,), on_rank, device))) == 1


def test_a_meta_tensor_draws_nothing(device, installed):
    mesh = as_rank(1, (4,), device)
    local = torch.empty(4, 6, device="meta")
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    before = state(default_generator(device))
    x.uniform_()
    assert torch.rand_like(x).to_local().is_meta
    if not IN_TREE:  # torch's dispatcher knows of no device=
        real = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
        assert torch.randn_like(real, device="meta").to_local().is_meta
    assert state(default_generator(device)) == before


@pytest.mark.parametrize("first", ["inference_mode", "no_grad", "device", "mode", "thread"])
def test_whatever_surrounds_the_first_draw(first, installed):
    """The buffers that CPU draws share are made at the first one, and serve later ones outside of it."""
    import threading

    def draw():
        return torch.rand_like(empty(16, 6, device_mesh=mesh, placements=[Shard(0)])).to_local().clone()

    surroundings = {
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "device": lambda: torch.device("meta"),  # as a default for factories
        "mode": CommDebugMode,
        "thread": contextlib.nullcontext,
    }
    mesh = as_rank(1, (4,))
    drawn = []

    def first_and_later():  # in a thread of its own, which has no buffers yet
        with surroundings[first]():
            torch.manual_seed(0)
            drawn.append(torch.rand_like(x).to_local().clone())
        torch.manual_seed(0)
        drawn.append(draw())

    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
    thread = threading.Thread(target=first_and_later)
    thread.start()
    thread.join()
    assert len(drawn) == 2 and torch.equal(*drawn)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, None, False])
def test_native_dropout_with_a_generator_is_what_the_cpu_kernel_does(p, train):
    from torch_dtensor_rng._ops import _native_dropout

    x = torch.randn(40, 6)
    torch.manual_seed(3)
    expected = torch.native_dropout(x, p, train)
    assert all(map(torch.equal, _native_dropout(x, p, train, torch.Generator().manual_seed(3)), expected))


def test_a_plain_draw_in_another_thread_is_not_disturbed(installed):
    """On the CPU, an op on a sharded tensor never puts its scratch state where other threads draw from."""
    import threading

    if IN_TREE:
        pytest.skip("the region works on the default slot")
    mesh = as_rank(1, (2,))
    x = empty(2048, 64, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    x.uniform_()
    torch.manual_seed(0)
    drawn: list[float] = []

    def plain():
        for _ in range(2000):
            drawn.append(torch.rand(()).item())

    thread = threading.Thread(target=plain)
    thread.start()
    while thread.is_alive():
        torch.native_dropout(x, 0.5, True)
        torch.rand_like(x)
    thread.join()
    torch.manual_seed(0)
    stream = set(torch.rand(1_000_000).tolist())
    assert all(value in stream for value in drawn)
