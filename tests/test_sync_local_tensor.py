"""The checks under LocalTensorMode, which keeps a generator state for each rank that it plays."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from test_local_tensor import rank_states, shards
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
from torch.testing._internal.distributed.fake_pg import FakeStore
from worlds import default_generator

import torch_dtensor_rng as tdr


@pytest.fixture
def world(device, installed):
    """``play(ranks)`` enters the mode, and returns it with a mesh of (pp 2, dp 2)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    default_generator(device)  # CUDA is initialised by it
    with contextlib.ExitStack() as stack:

        def play(ranks=4):
            mode = stack.enter_context(LocalTensorMode(ranks))
            mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
            torch.manual_seed(3)
            return mode, mesh

        yield play


def draw_alone(mode, rank, device):
    """One plain draw on a simulated rank, and on no other."""
    cpu, others = mode._per_rank_rng_states[rank]
    generator = torch.Generator(device)
    generator.set_state(cpu if device == "cpu" else others[0])
    with mode.disable():
        torch.rand(1, device=device, generator=generator)
    state = generator.get_state()
    mode._per_rank_rng_states[rank] = (state, others) if device == "cpu" else (cpu, {**others, 0: state})


def caught(check):
    with pytest.raises(tdr.RNGDesyncError) as raised:
        check()
    return str(raised.value), raised.value.states


def all_states(mode, device):
    """Every state that a check could move: the simulated ranks', and that of the live generator, which torch leaves where
    the last rank of the last op was."""
    return rank_states(mode, device), bytes(default_generator(device).get_state().numpy())


def test_in_step(world, device):
    mode, mesh = world()
    meshes = [mesh, mesh["pp"], mesh["dp"]]
    empty(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()]).uniform_()
    generator = torch.Generator(device).manual_seed(5)
    before = all_states(mode, device)
    for one in meshes:
        tdr.check_rng_sync(one)
        tdr.check_rng_sync(one, generator)
    assert all_states(mode, device) == before
    assert torch.equal(generator.get_state(), torch.Generator(device).manual_seed(5).get_state())


@pytest.mark.parametrize("odd", range(4))
def test_a_simulated_rank_that_drifts_is_named(odd, world, device):
    mode, mesh = world()
    draw_alone(mode, odd, device)
    before = all_states(mode, device)
    text, states = caught(lambda: tdr.check_rng_sync(mesh))
    assert all_states(mode, device) == before
    pp, dp = divmod(odd, 2)
    assert text.startswith(
        f"The default {device} generator is not in the same state on all ranks of the {device} mesh (pp 2, dp 2) of ranks 0-3."
    )
    assert f"The odd one out: rank {odd}, at pp {pp}, dp {dp}." in text
    assert sorted(states) == [0, 1, 2, 3]
    assert [rank for rank in range(4) if states[rank] != states[(odd + 1) % 4]] == [odd]
    if device == "cuda":
        assert states == {rank: (1, 3, 4 * (rank == odd)) for rank in range(4)}
    tdr.check_rng_sync(mesh, torch.Generator(device))  # a generator that was passed is one for all


def test_each_rank_is_in_its_own_slice(world, device):
    mode, mesh = world()
    draw_alone(mode, 3, device)
    for name, ranks, listed in (("pp", [1, 3], "1, 3"), ("dp", [2, 3], "2-3")):
        text, states = caught(lambda: tdr.check_rng_sync(mesh[name]))  # noqa: B023
        assert f"all ranks of the {device} mesh ({name} 2) of ranks {listed}." in text
        assert sorted(states) == ranks and states[ranks[0]] != states[3]


def test_stages_that_are_seeded_apart(world, device):
    mode, mesh = world()
    tdr.manual_seed(8, mesh, distinct_dims=("pp",))
    stage = mesh["dp"]
    before = all_states(mode, device)
    tdr.check_rng_sync(stage)
    text, states = caught(lambda: tdr.check_rng_sync(mesh))
    assert "They differ along pp, and agree along dp." in text
    assert states[0] == states[1] != states[2] == states[3]
    assert all_states(mode, device) == before


def test_a_mode_that_plays_some_ranks_only(world, device):
    mode, mesh = world(frozenset({0, 1, 3}))
    tdr.check_rng_sync(mesh)
    draw_alone(mode, 3, device)
    text, states = caught(lambda: tdr.check_rng_sync(mesh))
    assert "The odd one out: rank 3, at pp 1, dp 1." in text
    assert sorted(states) == [0, 1, 3]


def draws(mesh, generator=None):
    x = empty(8, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    y = x.uniform_(generator=generator).clone()
    return [shard for drawn in (y, torch.nn.functional.dropout(y), torch.randn_like(y)) for shard in shards(drawn)]


def test_the_debug_mode_changes_nothing(world, device):
    mode, mesh = world()
    plain, after = draws(mesh), rank_states(mode, device)
    torch.manual_seed(3)
    with tdr.RNGSyncDebugMode(history=4):
        watched = draws(mesh)
        assert rank_states(mode, device) == after
        draws(mesh, torch.Generator(device).manual_seed(1))
    assert all(map(torch.equal, plain, watched))


@pytest.mark.parametrize("odd", range(4))
def test_the_debug_mode_names_the_op_and_the_rank(odd, world, device):
    mode, mesh = world()
    with tdr.RNGSyncDebugMode():
        draws(mesh)
        draw_alone(mode, odd, device)
        before = rank_states(mode, device)
        text, states = caught(lambda: draws(mesh))
    assert rank_states(mode, device) == before, "the op has not run"
    assert text.startswith(
        "Drifted before aten.uniform_.default on a DTensor of shape (8, 6) and placements [S(0), R]: the default"
    )
    assert f"The odd one out: rank {odd}, at " in text
    assert [rank for rank in range(4) if states[rank] != states[(odd + 1) % 4]] == [odd]


def test_the_trail_is_that_of_a_simulated_rank(world, device):
    mode, mesh = world()
    with tdr.RNGSyncDebugMode(history=4):
        draws(mesh)
        draw_alone(mode, 1, device)
        text, found = caught(lambda: draws(mesh))
    states = [line.strip().split(" -> ") for line in text.splitlines() if " -> " in line]
    assert len(states) == 3 and states[-1][1] == str(found[0]), "where rank 0 is when rank 1 has drifted"
    assert all(one[1] == other[0] != one[0] for one, other in itertools.pairwise(states))
