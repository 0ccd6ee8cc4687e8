"""Ranks that drift apart on CUDA generators are found: real processes over gloo, which may share one device."""

import pytest
import torch
from test_sync_training import caught
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
from worlds import default_generator, gloo

import torch_dtensor_rng as tdr

pytestmark = pytest.mark.gpu

SEED, LARGE_SEED = 7, 2**64 - 1
OPS = {
    "uniform_": lambda x: x.uniform_(),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
}


def drifts(rank, device):
    """What each check finds on this rank; rank 2 makes a plain draw of its own before some of them."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    default = default_generator(device)
    found = {}

    def draw_alone(generator=None):
        if rank == 2:
            torch.rand(1, device=device, generator=generator)

    def check(name, passed=None):
        generator = default if passed is None else passed
        before = generator.get_state(), default.get_state()
        found[name] = caught(lambda: tdr.check_rng_sync(mesh, passed))
        assert all(map(torch.equal, before, (generator.get_state(), default.get_state())))

    torch.manual_seed(SEED)
    check("in step")
    draw_alone()
    check("default")
    generator = torch.Generator(device).manual_seed(LARGE_SEED)
    check("in step, passed", generator)
    draw_alone(generator)
    check("passed", generator)

    x = empty(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    with tdr.install():
        for name, op in OPS.items():
            torch.manual_seed(SEED)
            with tdr.RNGSyncDebugMode(history=2):
                op(x)
                draw_alone()
                found[name] = caught(lambda: op(x))  # noqa: B023
        torch.manual_seed(SEED)
        draw_alone()
        line = mesh["tp"]
        with tdr.RNGSyncDebugMode(line):
            found["another mesh"] = caught(lambda: OPS["uniform_"](x))
            y = empty(8, 4, device_mesh=line, placements=[Shard(0)])
            found["the mesh"] = caught(lambda: OPS["native_dropout"](y))
    return found


@pytest.fixture(scope="module")
def results():
    return gloo(4, drifts, "cuda")


def in_table(text, seed, offset, ranks):
    return any(line.split() == f"seed {seed}, offset {offset} {ranks}".split() for line in text.splitlines())


@pytest.mark.parametrize("passed", [False, True], ids=["default", "generator="])
def test_a_rank_that_drifts(passed, results):
    of = "the generator that was passed, on cuda, is" if passed else "the default cuda generator is"
    seed, kept = (LARGE_SEED, -1) if passed else (SEED, SEED)  # states hold the seed as a signed integer
    for found in results:
        assert found["in step, passed" if passed else "in step"] is None
        text, states = found["passed" if passed else "default"]
        assert states == {0: (1, kept, 0), 1: (1, kept, 0), 2: (1, kept, 4), 3: (1, kept, 0)}
        assert text.lower().startswith(of)
        assert "on all ranks of the cuda mesh (dp 2, tp 2) of ranks 0-3." in text
        assert in_table(text, seed, 0, "0-1, 3") and in_table(text, seed, 4, "2")
        assert "The odd one out: rank 2, at dp 1, tp 0." in text


@pytest.mark.parametrize("name", OPS)
def test_the_debug_mode_names_the_op(name, results):
    for rank, found in enumerate(results):
        text, states = found[name]
        # The op in step, of 32 elements, has taken every rank to 32.
        assert states == {0: (1, SEED, 32), 1: (1, SEED, 32), 2: (1, SEED, 36), 3: (1, SEED, 32)}
        op = f"aten.{name}.default on a DTensor of shape (8, 4) and placements [S(0), R]"
        assert text.startswith(f"Drifted before {op}: the default cuda generator is not in the same state")
        assert in_table(text, SEED, 32, "0-1, 3") and in_table(text, SEED, 36, "2")
        trail = text.partition(f"The last draws of this rank, rank {rank}:\n")[2]
        assert op in trail and f"seed {SEED}, offset 0 -> seed {SEED}, offset 32" in trail


def test_only_the_mesh_that_was_named(results):
    for rank, found in enumerate(results):
        assert found["another mesh"] is None
        if rank < 2:
            assert found["the mesh"] is None
            continue
        text, states = found["the mesh"]
        assert states == {2: (1, SEED, 36), 3: (1, SEED, 32)}
        assert text.startswith("Drifted before aten.native_dropout.default on a DTensor")
        assert "of the cuda mesh (tp 2) of ranks 2-3." in text
