"""torch.compile: what works without the package works with it, with shards that differ and eager mode's numbers."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from test_single_device import EXACT
from torch.distributed.tensor import Replicate, Shard, empty
from torch.utils import _pytree as pytree
from worlds import as_rank, default_generator, each_rank

import torch_dtensor_rng as tdr

FUNCTIONS = {
    "uniform_": lambda x: x.uniform_(-1, 1) * 2,
    "normal_": lambda x: x.normal_() * 2,
    "randn_like": lambda x: torch.randn_like(x) + 1,
    "dropout": lambda x: F.dropout(x * 1.0, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x * 1.0, 0.5, True)[0],
    # A power of two, as a compiler may fuse the product into the sum.
    "two of a kind": lambda x: torch.rand_like(x) + 8 * torch.rand_like(x),
    "two dropouts": lambda x: F.dropout(x * 1.0, 0.5) + 8 * F.dropout(x * 1.0, 0.5),
}


@pytest.fixture(params=["offset", "single_device"])
def policy(request):
    with tdr.install(request.param):
        yield request.param


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_is_eager(name, backend, device, policy):
    fn = FUNCTIONS[name]

    def on_rank(rank, mesh):
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(0), Replicate()]).fill_(1)
        torch.manual_seed(0)
        eager = [fn(x.clone()).to_local().clone() for _ in range(2)]
        end = default_generator(device).get_state()
        torch.compiler.reset()
        compiled = torch.compile(fn, backend=backend, fullgraph=True)
        torch.manual_seed(0)
        drawn = [compiled(x.clone()).to_local().clone() for _ in range(2)]
        assert all(map(torch.equal, eager, drawn))
        assert torch.equal(end, default_generator(device).get_state())
        return drawn[0]

    drawn = each_rank((2, 2), on_rank, device)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


ROWS = {
    "exponential_": lambda x: F.gumbel_softmax(x * 1.0),
    "geometric_": lambda x: (x * 1.0).geometric_(0.1) + 0,
    "poisson": lambda x: torch.poisson(x * 50.0) + 0,
    "binomial": lambda x: torch.binomial(x * 1000.0, x * 0.3) + 0,
    "_standard_gamma": lambda x: torch._standard_gamma(x * 2.0) + 0,
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x * 2.0) + 0,
    "multinomial": lambda x: torch.multinomial(x * 1.0, 4) + 0,
    "rrelu": lambda x: F.rrelu(x * -1.0, 0.1, 0.9, True) * 1,
    "normal(mean, std)": lambda x: torch.normal(x * 1.0, x * 2.0) + 0,
    "bernoulli(p)": lambda x: torch.bernoulli(x * 0.5) + 0,
    "bernoulli_(p)": lambda x: (x * 1.0).bernoulli_(x * 0.5) + 0,
    "alpha_dropout": lambda x: F.alpha_dropout(x * 1.0, 0.5, True),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.reshape(16, 1, 3, 2),) * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:.*cannot draw the numbers of one device")
def test_a_compiled_row_is_eager(name, device, policy):
    fn = ROWS[name]
    mesh = as_rank(1, (2, 2), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0), Replicate()]).fill_(1)
    torch.manual_seed(0)
    eager = fn(x.clone()).to_local().clone()
    end = default_generator(device).get_state()
    torch.compiler.reset()
    torch.manual_seed(0)
    drawn = torch.compile(fn, backend="aot_eager", fullgraph=True)(x.clone()).to_local()
    assert torch.equal(eager, drawn)
    assert torch.equal(end, default_generator(device).get_state())


TWICE = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": lambda x: torch.rand_like(x) * x,
    "bernoulli": lambda x: torch.bernoulli(x) * x,
    "uniform_": lambda x: torch.empty_like(x).uniform_() * x,
    "poisson": lambda x: torch.poisson(x.detach() * 50) * x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x) * x,
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.9, True) * x,
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", TWICE)
def test_two_equal_draws_of_a_graph_with_gradients_are_not_merged(name, backend, device, installed):
    """The graph of forward and backward is searched for equal nodes."""
    draw = TWICE[name]
    mesh = as_rank(1, (4,), device)
    x = empty(16, 8, device_mesh=mesh, placements=[Shard(0)]).fill_(0.5).requires_grad_()
    torch.compiler.reset()
    torch.manual_seed(0)
    eager = [one.to_local() for one in (draw(x), draw(x))]
    end = default_generator(device).get_state()
    torch.manual_seed(0)
    compiled = torch.compile(lambda x: (draw(x), draw(x)), backend=backend, fullgraph=True)(x)
    first, second = (one.to_local() for one in compiled)
    assert not torch.equal(first, second)
    torch.testing.assert_close([first, second], eager)
    assert torch.equal(end, default_generator(device).get_state())


def test_gradients_use_the_masks_of_the_forward(device, installed):
    mesh = as_rank(1, (4,), device)
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(1).requires_grad_()
    fn = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager", fullgraph=True)
    out = fn(x)
    out.sum().backward()
    assert torch.equal(x.grad.to_local(), out.to_local().detach())


# A graph cannot call what is named like a keyword; inductor's logarithm rounds otherwise than eager mode's.
NOT_COMPILED = {"random.from", "gumbel_noise"}


@pytest.mark.parametrize("passed", [False, True], ids=["default", "passed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_every_exact_op_in_one_graph(backend, passed, device, policy):
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = as_rank(1, (2, 2), device)
    generator = torch.Generator(device) if passed else None
    live = generator or default_generator(device)
    names = sorted(EXACT.keys() - NOT_COMPILED)
    xs = [
        empty(5, 6, dtype=EXACT[name][1][0], device_mesh=mesh, placements=[Shard(1), Shard(0)]).fill_(1)
        for name in names
    ]

    def fn(xs):
        return [EXACT[name][0](x.clone(), generator) for name, x in zip(names, xs)]

    def three_calls(fn):
        torch.manual_seed(0)
        live.manual_seed(1)
        drawn = [pytree.tree_map(lambda out: out.to_local().clone(), fn(xs)) for _ in range(3)]
        return drawn, torch.get_rng_state(), live.get_state()

    eager, *ends = three_calls(fn)
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled, *compiled_ends = three_calls(torch.compile(fn, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    for call in range(3):
        for name, ours, expected in zip(names, compiled[call], eager[call]):
            torch.testing.assert_close({name: ours}, {name: expected}, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, ends, compiled_ends))


GENERATORS = {
    "init": lambda x, g: torch.nn.init.kaiming_uniform_(x, generator=g),
    "bernoulli(p)": lambda x, g: torch.bernoulli(x * 0.5, generator=g),
    "bernoulli_(p)": lambda x, g: x.bernoulli_(x * 0.5, generator=g),
    "poisson": lambda x, g: torch.poisson(x * 50, generator=g),
    "poisson, by position": lambda x, g: torch.poisson(x * 50, g),
    "binomial": lambda x, g: torch.binomial(x * 50, x * 0.5, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x * 50, 2, generator=g),
    "rand_like.generator": lambda x, g: torch.ops.aten.rand_like.generator(x, generator=g),
    "the default one": lambda x, g: x.normal_(generator=torch.default_generator if x.is_cpu else g),
    "none": lambda x, g: torch.ops.aten.rand_like.generator(x, generator=None),
}


@pytest.mark.filterwarnings("ignore:.*cannot draw the numbers of one device")
@pytest.mark.parametrize("name", GENERATORS)
def test_a_passed_generator(name, device, policy):
    def fn(x, generator):
        return GENERATORS[name](x * 1.0, generator) + 8 * GENERATORS[name](x * 1.0, generator)

    x = empty(8, 6, device_mesh=as_rank(1, (2,), device), placements=[Shard(0)]).fill_(1)
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for seed in (1, 2):  # a generator of its own for each, whose memory the next may get
            torch.manual_seed(seed + 7)
            eager = fn(x, torch.Generator(device).manual_seed(seed)).to_local(), torch.get_rng_state()
            torch.manual_seed(seed + 7)
            drawn = compiled(x, torch.Generator(device).manual_seed(seed)).to_local(), torch.get_rng_state()
            assert all(map(torch.equal, eager, drawn))


def test_a_plain_tensor_breaks_the_graph_as_without_the_package(installed):
    generator = torch.Generator()
    compiled = torch.compile(lambda x: x.normal_(generator=generator) * 2, backend="eager")
    generator.manual_seed(0)
    eager = torch.empty(8).normal_(generator=generator) * 2
    generator.manual_seed(0)
    assert torch.equal(compiled(torch.empty(8)), eager)


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from worlds import as_rank
from torch.distributed.tensor import Shard, empty
import torch_dtensor_rng as tdr
if sys.argv[2] == "installed":
    tdr.install()
mesh = as_rank(int(sys.argv[1]), (2,))
x = empty(8, 4, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
torch.manual_seed(0)
eager = torch.randn_like(x).to_local()
torch.manual_seed(0)
compiled = torch.compile(lambda x: torch.randn_like(x), fullgraph=True)(x).to_local()
print(bool(torch.equal(eager, compiled)) or sys.argv[2], eager.flatten()[0].item())
"""


def test_no_graph_is_served_to_another_rank_or_across_an_installation(tmp_path):
    """One cache folder: without the package, then rank 0, then rank 1."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    script = SCRIPT.format(tests=os.path.dirname(__file__))
    first = {}
    for rank, how in ((0, "bare"), (0, "installed"), (1, "installed"), (1, "bare")):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(rank), how],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        equal, first[rank, how] = run.stdout.split()
        assert equal == "True" or how == "bare"
    assert first[0, "installed"] != first[1, "installed"]


def test_what_was_compiled_before_is_compiled_again():
    x = empty(8, 4, device_mesh=as_rank(1, (2,)), placements=[Shard(0)]).fill_(1)
    fn = torch.compile(lambda x: torch.rand_like(x), backend="aot_eager", fullgraph=True)
    fn(x)  # on the CPU, as torch 2.11 does not trace it on CUDA
    with tdr.install():
        torch.manual_seed(0)
        eager = torch.rand_like(x).to_local()
        torch.manual_seed(0)
        assert torch.equal(fn(x).to_local(), eager)


def test_fake_tensors_move_nothing(device, installed):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh = as_rank(1, (2,), device)
    before = default_generator(device).get_state()
    with FakeTensorMode():
        x = empty(8, 4, device_mesh=mesh, placements=[Shard(0)])
        assert torch.randn_like(x.uniform_()).shape == (8, 4)
    assert torch.equal(before, default_generator(device).get_state())


MESHES = {
    "row-major": torch.arange(8).view(2, 2, 2),
    "a sub-mesh": torch.arange(8).view(2, 2, 2)[1],
    "strided": torch.arange(8).view(2, 2, 2)[:, 1],
    "one rank": torch.tensor([5]),
    "out of order": torch.tensor([[3, 1], [0, 2]]),
    "with gaps": torch.tensor([1, 2, 5]),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_rank_finds_its_coordinate_in_a_graph(name):
    from torch.distributed.device_mesh import DeviceMesh

    from torch_dtensor_rng import _traced

    table = MESHES[name]
    as_rank(int(table.flatten()[0]), (8,))
    mesh = DeviceMesh("cpu", table)
    ranks, strides = _traced._mesh_geometry(mesh, int(table.flatten()[0]))
    for rank in table.flatten().tolist():
        coordinate = (table == rank).nonzero().flatten().tolist()
        at = {"ranks": ranks, "mesh_strides": strides, "mesh_shape": table.shape}
        assert _traced._coordinate(rank, at) == coordinate
    assert bool(ranks) == (name in ("out of order", "with gaps"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trunc_normal_in_a_compiled_function_is_eager(backend, installed):
    def fn(x):
        return torch.nn.init.trunc_normal_(x * 1.0, a=-1.0, b=1.0) * 2

    x = empty(32, 8, device_mesh=as_rank(1, (2,)), placements=[Shard(0)]).fill_(1)
    torch.manual_seed(0)
    eager = fn(x).to_local()
    end = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.compile(fn, backend=backend)(x).to_local(), eager)
    assert torch.equal(torch.get_rng_state(), end)
    assert bool((eager.abs() <= 2).all())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_placements_of_fsdp_and_tensor_parallel(dynamic, installed):
    from torch.distributed.tensor.placement_types import _StridedShard

    def fn(x):
        return torch.randn_like(x) + F.dropout(x, 0.5)

    if dynamic and torch.__version__.startswith("2.11."):
        pytest.skip(
            "torch 2.11's geometry makes a tensor of a _StridedShard's offsets, which dynamic shapes cannot trace"
        )
    mesh = as_rank(1, (2, 2))
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (8, 12):
        x = empty(rows, 6, device_mesh=mesh, placements=[_StridedShard(0, split_factor=2), Shard(0)]).fill_(1)
        torch.manual_seed(0)
        eager, end = fn(x).to_local(), torch.get_rng_state()
        torch.manual_seed(0)
        assert torch.equal(compiled(x).to_local(), eager)
        assert torch.equal(torch.get_rng_state(), end)
