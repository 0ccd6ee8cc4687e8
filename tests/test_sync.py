"""Ranks that drift apart are found, on every rank of the mesh, and named."""

import copy
import datetime
import os
import pickle
import warnings

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from worlds import as_rank, gloo

import torch_dtensor_rng as tdr


def caught(draw):
    """What is raised, as plain data."""
    try:
        draw()
    except tdr.RNGDesyncError as error:
        return str(error), {rank: tuple(state) for rank, state in error.states.items()}
    return None


def two_dims():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def check_after_a_plain_draw_on_rank_2(rank):
    mesh = two_dims()
    torch.manual_seed(7)
    in_step = caught(lambda: tdr.check_rng_sync(mesh))
    if rank == 2:
        torch.rand(1)
    before = torch.get_rng_state()
    found = caught(lambda: tdr.check_rng_sync(mesh))
    assert torch.equal(before, torch.get_rng_state())
    generator = torch.Generator().manual_seed(3)
    passed = caught(lambda: tdr.check_rng_sync(mesh, generator))
    generator.manual_seed(rank // 2)
    return in_step, found, passed, caught(lambda: tdr.check_rng_sync(mesh, generator))


def seeded_by_rank(rank, mesh, x):
    torch.manual_seed(rank)
    return lambda: x.uniform_()


def a_draw_under_if(rank, mesh, x):
    x.normal_()
    if rank == 0:
        torch.randn(3)
    return lambda: x.uniform_()


def samples_augmented_in_the_main_process(rank, mesh, x):
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4 + rank // 2

        def __getitem__(self, index):
            return torch.rand(1)

    for _ in torch.utils.data.DataLoader(Samples(), batch_size=2):
        pass
    return lambda: torch.nn.functional.dropout(x)


def an_op_on_a_sub_mesh(rank, mesh, x):
    if mesh.get_local_rank("dp") == 0:
        empty(8, 4, device_mesh=mesh["tp"], placements=[Shard(0)]).uniform_()
    return lambda: x.normal_()


def a_loop_that_stops_on_a_local_value(rank, mesh, x):
    def loop():
        for _ in range(1 + rank // 3):
            x.normal_()
        x.uniform_()

    return loop


def a_region_switched_off_on_one_rank(rank, mesh, x):
    import torch.distributed.tensor._random as torch_random

    torch_random._rng_tracker.distribute_region_enabled = rank != 1
    return lambda: x.uniform_()


def an_op_that_raises_on_one_rank(rank, mesh, x):
    x.to_local().fill_(2.0 if rank == 3 else 0.5)
    return lambda: torch.bernoulli(x)


def another_shape_on_one_rank(rank, mesh, x):
    y = empty(8, 4 + (rank == 3), device_mesh=mesh, placements=[Shard(0), Replicate()])
    return lambda: y.uniform_()


DRIFTS = [
    seeded_by_rank,
    a_draw_under_if,
    samples_augmented_in_the_main_process,
    an_op_on_a_sub_mesh,
    a_loop_that_stops_on_a_local_value,
    a_region_switched_off_on_one_rank,
    an_op_that_raises_on_one_rank,
    another_shape_on_one_rank,
]


def drifted(rank):
    mesh = two_dims()
    found = {}
    for drift in DRIFTS:
        with tdr.install():
            torch.manual_seed(0)
            x = empty(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
            with tdr.RNGSyncDebugMode():
                found[drift.__name__] = caught(lambda: drift(rank, mesh, x)())  # noqa: B023
    return found


class TestDriftIsFound(expecttest.TestCase):
    """The head of each error, on rank 0; every rank says the same, but for its own trail."""

    @classmethod
    def setUpClass(cls):
        cls.results = gloo(4, drifted)

    def check(self, drift, expected):
        texts = [result[drift.__name__] for result in self.results]
        self.assertTrue(all(texts), "every rank raises")
        self.assertTrue(all(states == texts[0][1] for _, states in texts), "every rank knows the state of all")
        heads = {text.partition("\nSeed all ranks")[0].partition(": ")[2] for text, _ in texts}
        self.assertEqual(len(heads), 1, heads)
        self.assertExpectedInline(texts[0][0].partition("\nSeed all ranks")[0], expected, skip=1)

    def test_seeded_by_rank(self):
        self.check(
            seeded_by_rank,
            """\
Drifted before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]: the default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state 029d9e8a266c7dd6  0
  state 25ccdee6a49511ad  1
  state ed05241eacd9a5f9  2
  state 9af8accdcec411bd  3

They differ along dp and tp.""",
        )

    def test_a_draw_under_if(self):
        self.check(
            a_draw_under_if,
            """\
Drifted before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]: the default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state 173d7753792fb110  1-3
  state 91209b9a41cc4076  0

The odd one out: rank 0, at dp 0, tp 0.
They differ along dp and tp.""",
        )

    def test_samples_augmented_in_the_main_process(self):
        self.check(
            samples_augmented_in_the_main_process,
            """\
Drifted before aten.bernoulli_.float on a DTensor of shape (8, 4) and placements [S(0), R]: the default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state cc6cfb33ece83b49  0-1
  state 98d35263603df18e  2-3

They differ along dp, and agree along tp.""",
        )

    def test_an_op_on_a_sub_mesh(self):
        self.check(
            an_op_on_a_sub_mesh,
            """\
Drifted before aten.normal_.default on a DTensor of shape (8, 4) and placements [S(0), R]: the default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state 173d7753792fb110  0-1
  state 029d9e8a266c7dd6  2-3

They differ along dp, and agree along tp.""",
        )

    def test_a_loop_that_stops_on_a_local_value(self):
        self.check(
            a_loop_that_stops_on_a_local_value,
            """\
Drifted before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]: ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3 are at different random ops.

  at                                                                                  ranks
  before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]  0-2
  before aten.normal_.default on a DTensor of shape (8, 4) and placements [S(0), R]   3

  generator               ranks
  state 173d7753792fb110  0-3

The odd one out: rank 3, at dp 1, tp 1.
They differ along dp and tp.""",
        )

    def test_a_region_switched_off_on_one_rank(self):
        self.check(
            a_region_switched_off_on_one_rank,
            """\
Drifted inside aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]: the default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state 173d7753792fb110  0, 2-3
  state 1796e1714101cca2  1

The odd one out: rank 1, at dp 0, tp 1.
They differ along dp and tp.""",
        )

    def test_an_op_that_raises_on_one_rank(self):
        self.check(
            an_op_that_raises_on_one_rank,
            """\
Drifted inside aten.bernoulli.default on a DTensor of shape (8, 4) and placements [S(0), R]: ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3 are at different random ops.

  at                                                                                      ranks
  after aten.bernoulli.default on a DTensor of shape (8, 4) and placements [S(0), R]      0-2
  raised in aten.bernoulli.default on a DTensor of shape (8, 4) and placements [S(0), R]  3

  generator               ranks
  state 173d7753792fb110  0-2
  state 029d9e8a266c7dd6  3

The odd one out: rank 3, at dp 1, tp 1.
They differ along dp and tp.""",
        )

    def test_another_shape_on_one_rank(self):
        self.check(
            another_shape_on_one_rank,
            """\
Drifted before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]: ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3 are at different random ops.

  at                                                                                  ranks
  before aten.uniform_.default on a DTensor of shape (8, 4) and placements [S(0), R]  0-2
  before aten.uniform_.default on a DTensor of shape (8, 5) and placements [S(0), R]  3

  generator               ranks
  state 029d9e8a266c7dd6  0-3

The odd one out: rank 3, at dp 1, tp 1.
They differ along dp and tp.""",
        )


class TestTexts(expecttest.TestCase):
    def test_one_rank_and_one_stage(self):
        results = gloo(4, check_after_a_plain_draw_on_rank_2)
        self.assertTrue(all(result == results[0] for result in results), "every rank raises, and says the same")
        in_step, found, passed, apart = results[0]
        self.assertIsNone(in_step)
        self.assertIsNone(passed)
        self.assertExpectedInline(
            found[0],
            """\
The default cpu generator is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state b42df0477b4a0acb  0-1, 3
  state 151b8814bb97fee1  2

The odd one out: rank 2, at dp 1, tp 0.
They differ along dp and tp.
Seed all ranks of the mesh alike (torch.manual_seed, torch_dtensor_rng.manual_seed), and run the same random ops on all of them, in the same order. torch_dtensor_rng.RNGSyncDebugMode() finds the first op at which they differ; docs/debugging.md has the usual causes.""",
        )
        self.assertExpectedInline(
            apart[0],
            """\
The generator that was passed, on cpu, is not in the same state on all ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3.

  generator               ranks
  state 029d9e8a266c7dd6  0-1
  state 25ccdee6a49511ad  2-3

They differ along dp, and agree along tp.
Seed all ranks of the mesh alike (torch.manual_seed, torch_dtensor_rng.manual_seed), and run the same random ops on all of them, in the same order. torch_dtensor_rng.RNGSyncDebugMode() finds the first op at which they differ; docs/debugging.md has the usual causes.""",
        )
        states = found[1]
        self.assertEqual(sorted(states), [0, 1, 2, 3])
        self.assertTrue(states[0] == states[1] == states[3] != states[2])


def stages(rank):
    """Three stages of two ranks, seeded apart; then one rank of the last stage drifts."""
    world = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "dp"))
    tdr.manual_seed(0, world, distinct_dims=("pp",))
    stage = world["dp"]
    x = empty(8, 4, device_mesh=stage, placements=[Shard(0)])
    with tdr.install():
        with tdr.RNGSyncDebugMode(history=2):
            for _ in range(world.get_local_rank("pp") + 1):  # stages may draw differently
                x.uniform_()
        own = caught(lambda: tdr.check_rng_sync(stage))
        whole = caught(lambda: tdr.check_rng_sync(world))
        if rank == 5:
            torch.rand(1)
        own_after = caught(lambda: tdr.check_rng_sync(stage))
    return own, whole[0].splitlines()[-2], own_after and (sorted(own_after[1]), own_after[0].splitlines()[-2])


def test_stages_that_are_seeded_apart_are_in_step_by_themselves():
    results = gloo(6, stages)
    assert all(own is None for own, _, _ in results)
    assert {whole for _, whole, _ in results} == {"They differ along pp, and agree along dp."}
    assert [found for _, _, found in results] == [None] * 4 + [([4, 5], "They differ along dp.")] * 2


def permuted_mesh(rank):
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    torch.manual_seed(int(rank == 3))
    return caught(lambda: tdr.check_rng_sync(mesh))


def test_a_mesh_whose_ranks_are_not_in_order():
    results = gloo(4, permuted_mesh)
    assert all(result == results[0] for result in results)
    text, states = results[0]
    assert "The odd one out: rank 3, at a 0, b 0." in text
    assert states[0] == states[1] == states[2] != states[3]


def a_rank_that_does_not_arrive(rank):
    lines = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    groups = []
    for dim in lines:
        made = [dist.new_group(ranks, timeout=datetime.timedelta(seconds=2)) for ranks in lines[dim]]
        groups += [group for group, ranks in zip(made, lines[dim]) if rank in ranks]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=tuple(lines))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    waited = None
    with tdr.install(), tdr.RNGSyncDebugMode():
        if rank != 3:
            try:
                empty(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()]).uniform_()
            except RuntimeError as error:
                waited = str(error)
    # On the store, as the groups of the mesh are broken now.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {rank}", "")
    store.wait([f"done {one}" for one in range(4)])
    return waited, torch.equal(before, torch.get_rng_state())


def test_a_rank_that_does_not_arrive():
    results = gloo(4, a_rank_that_does_not_arrive, timeout=40)
    assert all(unmoved for _, unmoved in results)
    texts = [text for text, _ in results]
    assert texts[3] is None
    for rank, text in enumerate(texts[:3]):
        assert text.startswith("Drifted before aten.uniform_.default on a DTensor of shape (8, 4)")
        assert f"rank {rank} waited for the other ranks of the cpu mesh (dp 2, tp 2) of ranks 0-3 to check that" in text


def outside(rank):
    mesh = DeviceMesh("cpu", [1, 2])
    torch.manual_seed(rank)
    found = caught(lambda: tdr.check_rng_sync(mesh))
    dist.barrier()
    return found and sorted(found[1])


def test_ranks_outside_the_mesh_do_nothing():
    assert gloo(4, outside) == [None, [1, 2], [1, 2], None]


def three_draws_then_a_drift(x, rank):
    x.normal_()
    x.uniform_()
    if rank == 1:
        torch.rand(1)
    x.exponential_()


def trails(rank):
    mesh = init_device_mesh("cpu", (2,))
    alone = DeviceMesh("cpu", [0])
    found = {}

    def run():
        torch.manual_seed(0)
        empty(8, 4, device_mesh=alone, placements=[Shard(0)]).log_normal_()  # rank 1 is outside of this mesh
        torch.manual_seed(0)
        return caught(lambda: three_draws_then_a_drift(empty(8, 4, device_mesh=mesh, placements=[Shard(0)]), rank))[0]

    with tdr.install():
        for history in (0, 2, 8):
            with tdr.RNGSyncDebugMode(history=history):
                found[history] = run()
        with tdr.RNGSyncDebugMode(alone):
            three_draws_then_a_drift(empty(8, 4, device_mesh=mesh, placements=[Shard(0)]), rank)
        three_draws_then_a_drift(empty(8, 4, device_mesh=mesh, placements=[Shard(0)]), rank)
    os.environ["TORCH_DTENSOR_RNG_DEBUG"] = "1"
    with tdr.install():
        found["variable"] = run()
    return found


def test_the_trail_of_the_last_draws_and_the_variable():
    for rank, found in enumerate(gloo(2, trails)):
        trail = {key: text.partition(f"The last draws of this rank, rank {rank}:\n")[2] for key, text in found.items()}
        assert trail[0] == "" and "The last draws" not in found[0]
        draws = [line for line in trail[2].splitlines() if " on a DTensor" in line]
        at = three_draws_then_a_drift.__code__.co_firstlineno
        assert [
            f"test_sync.py:{at + i}: aten.{op}_.default" in line
            for i, op, line in zip((1, 2), ("normal", "uniform"), draws)
        ] == [True] * 2
        outside = "aten.log_normal_.default" not in trail[8]
        assert outside == (rank == 1), "what this rank has not drawn is not in its trail"
        assert trail["variable"] == trail[8]


def test_compiled_graphs_are_not_looked_into_and_it_says_so_once(installed):
    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
    double = torch.compile(lambda x: torch.rand_like(x) * 2, backend="aot_eager", fullgraph=True)
    double(x)
    with tdr.RNGSyncDebugMode():
        with pytest.warns(UserWarning, match="does not look inside compiled or captured graphs"):
            double(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            double(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        double(x)


def unseen(rank):
    """What is said of ranks that were seeded by rank, in ways of drawing that are none of torch's own ops."""
    mesh = init_device_mesh("cpu", (2,))
    x = empty(4, 2, device_mesh=mesh, placements=[Shard(0)])
    generator = torch.Generator()

    def install_inside():
        with tdr.install():
            x.uniform_()

    found = {}
    with tdr.install():
        for name, draw in {
            "randperm": lambda: tdr.randperm(8, device_mesh=mesh, placements=[Shard(0)]),
            "installed inside": install_inside,
            "graph break": lambda: torch.compile(lambda y: (y + 1).uniform_(generator=generator), backend="eager")(x),
        }.items():
            torch.manual_seed(rank)
            generator.manual_seed(rank)
            with tdr.RNGSyncDebugMode():
                found[name] = caught(draw)
        torch.manual_seed(0)
        with tdr.RNGSyncDebugMode():
            found["passed on one rank"] = caught(
                lambda: x.uniform_(generator=None if rank else torch.default_generator)
            )
            long = empty(*[1] * 80, 2, 2, device_mesh=mesh, placements=[Shard(80 + rank)])
            found["long texts"] = caught(long.uniform_)
            moved = empty(4, 2, device_mesh=mesh, placements=[Shard(rank)])
            found["second argument"] = caught(lambda: torch.binomial(x.fill_(1), moved.fill_(1)))
    torch.manual_seed(5 + (rank << 40))  # of which a CPU generator uses 32 bits
    tdr.check_rng_sync(mesh)
    return found


def test_no_draw_goes_unseen():
    for found in gloo(2, unseen):
        assert found.pop("randperm")[0].startswith(
            "Drifted before torch_dtensor_rng.randperm on a DTensor of shape (8,)"
        )
        for name in ("installed inside", "graph break"):
            assert found.pop(name)[0].startswith("Drifted before aten.uniform_.default on a DTensor"), name
        for name, (text, _) in found.items():
            assert "are at different random ops" in text, name


def test_the_error_can_be_sent():
    error = tdr.RNGDesyncError("ranks differ", {0: (1, 2, 3)})
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(copied), copied.states) == ("ranks differ", {0: (1, 2, 3)})


def test_what_is_no_mesh_and_no_history(installed):
    for bad in (8, "mesh", torch.device("cpu")):
        with pytest.raises(TypeError, match="expects device_mesh to be a DeviceMesh, found"):
            tdr.RNGSyncDebugMode(bad)
        with pytest.raises(TypeError, match="expects device_mesh to be a DeviceMesh, found"):
            tdr.check_rng_sync(bad)
    for bad in (None, "3", 2.5):
        with pytest.raises(TypeError, match="expects history to be an int, found"):
            tdr.RNGSyncDebugMode(history=bad)
    with pytest.raises(TypeError, match=r"expects generator to be a torch.Generator, found int"):
        tdr.check_rng_sync(as_rank(0, (2,)), 3)


def test_modes_and_installations_that_cross(installed):
    mode = tdr.RNGSyncDebugMode()
    with mode, pytest.raises(RuntimeError, match="is on already"), mode:
        pass
    handlers = {**DTensor._op_dispatcher._custom_op_handlers}
    with pytest.raises(ValueError, match="mine"), tdr.RNGSyncDebugMode():
        tdr.install()
        raise ValueError("mine")
    tdr.uninstall()  # and the mode, whose block has been left
    assert handlers == DTensor._op_dispatcher._custom_op_handlers


def test_what_has_no_generator_is_not_checked(installed):
    x = empty(4, 2, device_mesh=as_rank(0, (1,)), placements=[Shard(0)])
    with tdr.RNGSyncDebugMode():
        assert torch.rand_like(x, device="meta").is_meta


@pytest.mark.parametrize("value, on", [("", False), ("0", False), ("false", False), ("Off", False), ("1", True)])
def test_the_variable_is_read(value, on, monkeypatch):
    monkeypatch.setenv("TORCH_DTENSOR_RNG_DEBUG", value)
    plain = tdr._dispatch.HANDLERS[torch.ops.aten.uniform_.default]
    with tdr.install():
        handler = DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.uniform_.default]
        assert (handler.__code__ is not plain.__code__) == on
