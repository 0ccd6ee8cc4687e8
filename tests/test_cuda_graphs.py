"""CUDA graphs under policy single_device: at every replay the shard is the slice of what the plain call would draw."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from test_disjoint import Sharding
from test_single_device import COLUMNS, EXACT, FSDP_TP, TAKE_NO_GENERATOR, Case, cases, same_bits
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty
from worlds import as_rank, default_generator, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _single_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*this CUDA graph draws the whole tensor"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]

# torch.normal looks at its standard deviations, which no capture allows.
CAPTURABLE = {name for name in EXACT if name != "normal_tensors"}


def captured(fn, generator=None, warm=True):
    """A graph of ``fn()``, and what it returns at each replay."""
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fn()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        outs = fn()
    return graph, outs


def check(case, warm=True):
    _, mesh_shape, placements = case.sharding
    whole = case.whole("cuda")

    def step(x, generator):
        out = EXACT[case.name][0](x, generator)
        return (*(out if isinstance(out, tuple) else (out,)), torch.rand(3, device="cuda", generator=generator))

    def on_rank(rank, mesh):
        passes = case.passes_generator and case.name not in TAKE_NO_GENERATOR
        generator = torch.Generator("cuda") if passes else None
        live = generator or default_generator("cuda")
        x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        graph, ours = captured(lambda: step(x, generator), generator, warm)
        for replay in range(4):
            if replay % 2 == 0:
                live.manual_seed(replay - 1)
                torch.rand(100, device="cuda", generator=generator)
            before = live.get_state()
            graph.replay()
            end = live.get_state()
            live.set_state(before)
            *plain, after = step(whole.clone(), generator)
            assert torch.equal(end, live.get_state()), "ends where the plain call ends"
            for drawn, expected in zip(ours, plain):
                slices = distribute_tensor(expected, mesh, placements, src_data_rank=None)._local_tensor
                assert same_bits(drawn._local_tensor, slices), (rank, replay)
            assert torch.equal(ours[-1], after), "the op after it"

    with tdr.install("single_device"):
        each_rank(mesh_shape, on_rank, "cuda")


@pytest.mark.parametrize("name", sorted(CAPTURABLE))
def test_every_op(name):
    for dtype in EXACT[name][1]:
        check(Case(COLUMNS, name, dtype, (0, 1), False))
        check(Case(FSDP_TP, name, dtype, (1, 0), True))


@settings(max_examples=15, deadline=None)
@given(cases(max_dim=300, max_ranks=4).filter(lambda case: case.name in CAPTURABLE))
def test_drawn_shards(case):
    check(case)


LAYOUTS = {
    "rows": Sharding((3001, 400), (3,), (Shard(0),)),
    "columns of a launch": Sharding((3000, 512), (2,), (Shard(1),)),
    "columns": Sharding((3000, 999), (3,), (Shard(1),)),
    "a box": Sharding((300, 7, 256), (2, 2), (Shard(2), Shard(0))),
    "empty shards": Sharding((2, 500), (3,), (Shard(0),)),
    "two past 32 bits": Sharding((27_000, 20_011), (2,), (Shard(0),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["uniform_", "normal_", "native_dropout"])
def test_every_kernel(layout, name):
    check(Case(LAYOUTS[layout], name, torch.float32, tuple(range(len(LAYOUTS[layout].shape))), name == "normal_"))


@pytest.mark.parametrize("name", ["normal_", "native_dropout"])
@pytest.mark.filterwarnings("default:.*this CUDA graph draws the whole tensor")
def test_without_a_run_before_the_capture_the_whole_is_drawn(name):
    _single_device.forget()
    with pytest.warns(UserWarning, match="has not run before the capture"):
        check(Case(LAYOUTS["columns"], name, torch.float32, (0, 1), False), warm=False)


def test_a_generator_that_the_graph_does_not_know():
    with tdr.install("single_device"):
        x = empty(8, 8, device_mesh=as_rank(1, (2,), "cuda"), placements=[Shard(0)])
        generator = torch.Generator("cuda")
        x.normal_(generator=generator)
        with pytest.raises(RuntimeError, match="generator"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.normal_(generator=generator)
        torch.manual_seed(0)
        torch.rand(8, device="cuda")  # the default one is in its own place again


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_policy_offset_says_which_policy_can(placement):
    with tdr.install("offset"):
        x = empty(8, 8, device_mesh=as_rank(1, (2,), "cuda"), placements=[placement])
        x.normal_()
        with pytest.raises(RuntimeError, match=r"policy='single_device'"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.normal_()


@pytest.mark.filterwarnings("ignore:.*cannot draw the numbers of one device")
def test_an_op_that_is_not_exact_raises():
    with tdr.install("single_device"):
        x = empty(8, 8, device_mesh=as_rank(1, (2,), "cuda"), placements=[Shard(0)]).fill_(1)
        torch.poisson(x)
        with pytest.raises(RuntimeError, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.poisson(x)


def test_the_debug_mode_says_that_it_does_not_look():
    x = empty(8, 8, device_mesh=as_rank(1, (2,), "cuda"), placements=[Shard(0)])
    with tdr.install("single_device"), tdr.RNGSyncDebugMode():
        x.normal_()
        with pytest.warns(UserWarning, match="captured graphs"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.normal_()


def in_step_with_eager(graphed, eager):
    """Ten steps of both from the same states, reseeded in the middle."""
    for step in range(10):
        if step % 5 == 0:
            torch.manual_seed(step)
        before = torch.cuda.get_rng_state()
        ours = [x.clone() for x in graphed()]
        end = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)
        expected = eager()
        assert torch.equal(end, torch.cuda.get_rng_state())
        assert all(map(torch.equal, ours, expected)), step


def test_a_training_step():
    def on_rank(rank, mesh):
        torch.manual_seed(0)
        batch = torch.randn(64, 128, device="cuda")
        weights = torch.randn(128, 96, device="cuda")

        def training():
            x = distribute_tensor(batch, mesh, [Shard(0), Replicate()], src_data_rank=None)
            w = distribute_tensor(weights, mesh, [Replicate(), Shard(1)], src_data_rank=None).requires_grad_()

            def step():
                out = F.dropout(x @ w, 0.4)
                loss = (out + torch.randn_like(out)).pow(2).mean()
                (gradient,) = torch.autograd.grad(loss, w)
                gradient = gradient.redistribute(placements=w.placements).to_local()
                with torch.no_grad():
                    w.to_local().sub_(gradient, alpha=0.1)
                return (out.to_local() == 0), gradient, w.to_local().detach()

            return step

        graph, outs = captured(training())

        def replay():
            graph.replay()
            return outs

        eager = training()
        eager()  # the capture's warm-up was a step too
        torch.cuda.synchronize()
        # The warm-ups drew different numbers: both go on from the same weights.
        outs[2].copy_(eager()[2])
        in_step_with_eager(replay, eager)

    with tdr.install("single_device"):
        each_rank((2, 2), on_rank, "cuda")


def test_make_graphed_callables():
    class Block(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.mesh = mesh
            self.up = nn.Linear(32, 64, device="cuda")

        def forward(self, x):
            x = DTensor.from_local(self.up(x), self.mesh, [Shard(0)], run_check=False)
            return F.dropout(x, 0.4).to_local()

    def on_rank(rank, mesh):
        torch.manual_seed(0)
        block = Block(mesh)
        x = torch.randn(16, 32, device="cuda", requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(Block(mesh), (x,))
        graphed.load_state_dict(block.state_dict())

        def step(module):
            module.zero_grad(set_to_none=True)
            out = module(x)
            out.sum().backward()
            return out.detach(), module.up.weight.grad

        in_step_with_eager(lambda: step(graphed), lambda: step(block))

    with tdr.install("single_device"):
        each_rank((2,), on_rank, "cuda")


def test_compiled_with_reduced_overhead():
    from torch._dynamo.utils import counters

    def fn(x):
        return F.dropout(x, 0.4), torch.randn_like(x), torch.empty_like(x).uniform_(-1, 1) * 2

    def on_rank(rank, mesh):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(fn, mode="reduce-overhead", fullgraph=True)
        x = empty(96, 50, device_mesh=mesh, placements=[Shard(1)]).fill_(1)
        in_step_with_eager(lambda: [one.to_local() for one in compiled(x)], lambda: [one.to_local() for one in fn(x)])
        assert not counters["inductor"]["cudagraph_skips"]

    with tdr.install("single_device"):
        each_rank((3,), on_rank, "cuda")
