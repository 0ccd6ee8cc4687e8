"""Generators in a distributed checkpoint: a run that is cut and goes on elsewhere, and checkpoints that cannot be loaded."""

import datetime
import os
import pathlib
import tempfile

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty
from worlds import as_rank, gloo

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _random
from torch_dtensor_rng._checkpoint import RNGState, _digest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).tolist()


def draws(x, data):
    """The next numbers of the default generator and of ``data``: of plain ops, and of ops on ``x``, a DTensor or not."""
    ones = torch.ones_like(x)
    return [
        torch.rand(3).tolist(),
        torch.rand(3, generator=data).tolist(),
        whole(x.uniform_()),
        whole(x.normal_(generator=data)),
        whole(torch.nn.functional.dropout(ones)),
    ]


SHAPE = (9, 5)
# (pp, dp) of a run that is cut into four parts: 4 ranks, then 2, 8 and 1.
PARTS = [(2, 2), (2, 1), (2, 4), (1, 1)]


def uninterrupted(seed):
    """The numbers of one process without the package, a list for each part."""
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed + 100)
    return [draws(torch.empty(SHAPE), data) for _ in PARTS]


def part(rank, mesh_shape, folder, number):
    """Part ``number`` of the run: of all ranks in step, and again of pipeline stages that are seeded apart."""
    world = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pp", "dp"))
    flat = init_device_mesh("cpu", (world.size(),))
    found = []
    with tdr.install(policy="single_device"):
        for run, mesh, distinct_dims in (("flat", flat, ()), ("stages", world, ("pp",))):
            data = torch.Generator()
            rng = RNGState({"data": data}, mesh, distinct_dims)
            if number == 0:
                tdr.manual_seed(0, mesh, distinct_dims=distinct_dims)
                data.manual_seed(100 + (world.get_local_rank("pp") if distinct_dims else 0))
            else:
                torch.manual_seed(1000 + rank)
                data.manual_seed(2000 + rank)
                dcp.load({"rng": rng}, checkpoint_id=f"{folder}/{run}{number - 1}")
            stage = world["dp"] if distinct_dims else flat
            found.append(draws(empty(*SHAPE, device_mesh=stage, placements=[Shard(0)]), data))
            dcp.save({"rng": rng}, checkpoint_id=f"{folder}/{run}{number}")
    return found


def test_a_run_cut_into_parts_draws_the_numbers_of_the_uninterrupted_one(tmp_path):
    expected = [uninterrupted(seed) for seed in (0, 1)]
    for number, (pp, dp) in enumerate(PARTS):
        for rank, (flat, stage) in enumerate(gloo(pp * dp, part, (pp, dp), str(tmp_path), number)):
            assert flat == expected[0][number], (number, rank)
            assert stage == expected[rank // dp][number], (number, rank)
        for run, indices in (("flat", 1), ("stages", pp)):  # once for each index, however many ranks there are
            metadata = dcp.FileSystemReader(tmp_path / f"{run}{number}").read_metadata()
            assert sorted(one.fqn for one in metadata.storage_data) == [f"rng.index_{i}" for i in range(indices)]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that are torn.
# ---------------------------------------------------------------------------------------------------------------------


def fail():
    raise OSError("no space left")


def die():
    os._exit(9)


class StopsMidway(dcp.FileSystemWriter):
    """Of what rank 1 writes, half gets to the storage; then ``stop`` is called there."""

    def __init__(self, path, stop):
        super().__init__(path)
        self.stop = stop

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        if dist.get_rank() == 1:
            for file in pathlib.Path(self.path).glob("__1_*"):
                halve(file)
            self.stop()
        return written


def halve(file):
    os.truncate(file, file.stat().st_size // 2)


def zero_a_block(file):
    """As a file system can leave it: the size is right, but a block of the generator's state was never written."""
    content = bytearray(file.read_bytes())
    start = content.index(bytes(4), 1000)  # the upper half of a word of mt19937, as is the end
    stop = content.index(bytes(4), start + 512)
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)


def app(mesh, data):
    """What a training script saves; every rank has something to write."""
    weight = empty(8, 4, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    return {"weight": weight, "rng": RNGState({"data": data}, mesh)}


def states(data):
    return torch.get_rng_state().tolist(), data.get_state().tolist()


def error_of(fn):
    try:
        fn()
    except (Exception, dcp.CheckpointException) as error:  # DCP's is a BaseException
        return f"{type(error).__name__}: {error}"
    return None


def torn(rank, folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(100)
    save = app(mesh, data)
    dcp.save(save, checkpoint_id=f"{folder}/good")
    expected = torch.rand(3).tolist(), torch.rand(3, generator=data).tolist()

    stopped = error_of(lambda: dcp.save(save, storage_writer=StopsMidway(f"{folder}/stopped", fail)))
    for damage in (halve, zero_a_block):
        dcp.save({"rng": save["rng"]}, checkpoint_id=f"{folder}/{damage.__name__}")
        if rank == 0:
            files = pathlib.Path(folder, damage.__name__).glob("*.distcp")
            damage(max(files, key=lambda file: file.stat().st_size))  # a rank with nothing to write has an empty one
    dist.barrier()
    before = states(data)
    errors = {
        name: error_of(lambda: dcp.load({"rng": save["rng"]}, checkpoint_id=f"{folder}/{name}"))  # noqa: B023
        for name in ("stopped", "halve", "zero_a_block")
    }
    # Rank 0 finds its index, rank 1 does not.
    more = {"rng": RNGState({"data": data}, mesh, ("pp",))}
    errors["more indices"] = error_of(lambda: dcp.load(more, checkpoint_id=f"{folder}/good"))
    unchanged = before == states(data)
    dcp.load(app(mesh, data), checkpoint_id=f"{folder}/good")
    return stopped, errors, unchanged, expected == (torch.rand(3).tolist(), torch.rand(3, generator=data).tolist())


class TestTornCheckpoints(expecttest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            cls.results = gloo(2, torn, folder)

    def test_nothing_changes_and_the_previous_one_loads(self):
        for stopped, errors, unchanged, goes_on in self.results:
            self.assertIn("OSError: no space left", stopped)
            self.assertTrue(all(errors.values()), "every rank raises")
            self.assertTrue(unchanged)
            self.assertTrue(goes_on)

    def test_the_errors(self):
        for _, errors, _, _ in self.results:
            self.assertIn("metadata is None", errors["stopped"])  # DCP writes it last
            self.assertIn("in read_data", errors["halve"])  # DCP's, in the words of what it happens to find there
            self.assertTrue(
                errors["more indices"].endswith("RuntimeError: Missing key in checkpoint state_dict: rng.index_1.\n")
            )
            self.assertExpectedInline(
                errors["zero_a_block"],
                """RuntimeError: RNGState cannot load the state of the default cpu generator in index_0: it is torn, not what was saved. Load another checkpoint.""",
            )


def killed(rank, store, folder):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(100)
    save = app(mesh, data)
    dcp.save(save, checkpoint_id=f"{folder}/step1")
    torch.rand(3)
    dcp.save(save, storage_writer=StopsMidway(f"{folder}/step2", die))


def test_a_process_is_killed_while_it_saves(tmp_path):
    context = mp.get_context("spawn")
    processes = [context.Process(target=killed, args=(rank, str(tmp_path / "store"), tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert processes[1].exitcode == 9 and processes[0].exitcode not in (0, None)

    torch.manual_seed(0)
    expected = torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(100))
    data = torch.Generator().manual_seed(8)
    rng = RNGState({"data": data})
    before = states(data)
    assert "metadata is None" in error_of(lambda: dcp.load({"rng": rng}, checkpoint_id=tmp_path / "step2"))
    assert before == states(data)
    dcp.load({"rng": rng}, checkpoint_id=tmp_path / "step1")
    assert all(map(torch.equal, expected, (torch.rand(3), torch.rand(3, generator=data))))


# ---------------------------------------------------------------------------------------------------------------------
# One process: what is held, and what is refused.
# ---------------------------------------------------------------------------------------------------------------------


class Philox:
    """What RNGState asks of a generator, with the state of a CUDA one: seed and offset."""

    device = torch.device("cuda", 0)

    def __init__(self, seed, offset):
        self.set_state(philox_state(seed, offset))

    def get_state(self):
        return self.state.clone()

    def set_state(self, state):
        self.state = state.clone()


def philox_state(seed, offset):
    return torch.tensor([seed, offset], dtype=torch.int64).view(torch.uint8)


def test_a_snapshot():
    generators = {"data": torch.Generator(), "noise": Philox(5, 8)}
    rng = RNGState(generators)
    assert isinstance(rng, Stateful)
    torch.manual_seed(0)
    snapshot = rng.state_dict()
    expected = torch.rand(3), torch.rand(3, generator=generators["data"])
    generators["noise"].set_state(philox_state(6, 12))
    rng.load_state_dict(snapshot)
    assert all(map(torch.equal, expected, (torch.rand(3), torch.rand(3, generator=generators["data"]))))
    assert torch.equal(generators["noise"].state, philox_state(5, 8))


def test_the_current_accelerator_without_a_mesh_and_the_mesh_device_with_one(monkeypatch):
    def held(*args):
        (entries,) = RNGState(*args).state_dict().values()
        return [(name, device_type) for name, device_type, _, _ in entries]

    mesh = as_rank(0, (2,))
    cuda, cpu = Philox(1, 4), torch.default_generator
    monkeypatch.setattr(_random, "_default_generator", lambda device: cpu if device.type == "cpu" else cuda)
    for accelerator, expected in ((None, ["cpu"]), (torch.device("cuda"), ["cpu", "cuda"])):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)  # noqa: B023
        assert held() == [(None, device_type) for device_type in expected]
        assert held({"a": cuda}, mesh) == [(None, "cpu"), ("a", "cuda")]


def test_saved_while_the_run_goes_on(tmp_path):
    torch.manual_seed(0)
    rng = RNGState()
    saving = dcp.async_save({"rng": rng}, checkpoint_id=tmp_path, no_dist=True)
    expected = torch.rand(3)
    saving.result()
    dcp.load({"rng": rng}, checkpoint_id=tmp_path)
    assert torch.equal(expected, torch.rand(3))


def test_the_index_along_the_distinct_dims():
    names = ("pp", "dp", "tp")
    for distinct_dims, index in (((), 0), ("tp", 1), (("pp",), 1), (("pp", "tp"), 3), (("tp", "dp"), 5)):
        mesh = as_rank(11, (2, 3, 2), names=names)  # at pp 1, dp 2, tp 1
        assert list(RNGState(None, mesh, distinct_dims).state_dict()) == [f"index_{index}"]


def test_a_rank_outside_the_mesh():
    as_rank(0, (2,))
    with pytest.raises(RuntimeError, match=r"^RNGState requires the current rank to be a part of the device mesh$"):
        RNGState(None, DeviceMesh("cpu", [1]))


class Refuses(torch.Generator):
    """As a CUDA generator does while a graph is captured."""

    def set_state(self, state):
        raise RuntimeError("not now")


def test_a_generator_that_refuses_leaves_the_others_where_they_were():
    data = torch.Generator()
    rng = RNGState({"data": data, "refuses": Refuses()})
    snapshot = rng.state_dict()
    torch.rand(1), torch.rand(1, generator=data)
    before = states(data)
    with pytest.raises(RuntimeError, match=r"^not now$"):
        rng.load_state_dict(snapshot)
    assert before == states(data)


def entry(name, device_type, state):
    content = bytes(state.numpy())
    return name, device_type, content, _digest(content)


class TestErrors(expecttest.TestCase):
    """Of a generator named data, and a CUDA one named noise; none of them moves."""

    def setUp(self):
        torch.manual_seed(0)
        self.data, self.noise = torch.Generator(), Philox(5, 8)
        self.mesh = as_rank(1, (2, 2), names=("dp", "pp"))
        self.rng = RNGState({"data": self.data, "noise": self.noise}, self.mesh, ("pp",))

    def saved(self, **changed):
        """The state dict of a run that had drawn, with entries changed, or taken out where they are None."""
        cpu = torch.Generator().manual_seed(9).get_state()
        entries = {
            "default": entry(None, "cpu", cpu),
            "data": entry("data", "cpu", cpu),
            "noise": entry("noise", "cuda", philox_state(7, 12)),
            **changed,
        }
        return {"index_1": tuple(one for one in entries.values() if one is not None)}

    def check(self, state_dict, expected):
        before = *states(self.data), self.noise.state.tolist()
        with self.assertRaises(RuntimeError) as caught:
            self.rng.load_state_dict(state_dict)
        self.assertEqual(before, (*states(self.data), self.noise.state.tolist()))
        self.assertExpectedInline(str(caught.exception), expected, skip=1)

    def test_what_is_right_loads(self):
        self.rng.load_state_dict(self.saved())
        self.assertEqual(self.noise.state.tolist(), philox_state(7, 12).tolist())

    def test_an_index_that_was_not_saved(self):
        value = self.saved()["index_1"]
        self.check(
            {"index_0": value, "index_2": value},
            """RNGState found no index_1 in the state dict, which holds: index_0, index_2. Wanted: the default cpu generator, generators['data'], generators['noise']. A checkpoint can be loaded at no more indices along distinct_dims than it was saved at.""",
        )

    def test_an_empty_state_dict(self):
        self.check(
            {},
            """RNGState found no index_1 in the state dict, which holds: nothing. Wanted: the default cpu generator, generators['data'], generators['noise']. A checkpoint can be loaded at no more indices along distinct_dims than it was saved at.""",
        )

    def test_a_generator_that_was_not_saved(self):
        self.check(
            self.saved(noise=None),
            """RNGState holds: the default cpu generator, generators['data'], generators['noise']; and index_1 of the checkpoint: the default cpu generator, generators['data']. Pass the generators that were saved, under the names they had, and a device_mesh of the same device type.""",
        )

    def test_a_generator_that_is_not_there(self):
        self.check(
            self.saved(other=entry("other", "cpu", self.data.get_state())),
            """RNGState holds: the default cpu generator, generators['data'], generators['noise']; and index_1 of the checkpoint: the default cpu generator, generators['data'], generators['noise'], generators['other']. Pass the generators that were saved, under the names they had, and a device_mesh of the same device type.""",
        )

    def test_a_default_generator_of_another_device(self):
        self.check(
            self.saved(cuda=entry(None, "cuda", philox_state(0, 0))),
            """RNGState holds: the default cpu generator, generators['data'], generators['noise']; and index_1 of the checkpoint: the default cpu generator, generators['data'], generators['noise'], the default cuda generator. Pass the generators that were saved, under the names they had, and a device_mesh of the same device type.""",
        )

    def test_from_cuda_to_cpu(self):
        self.check(
            self.saved(data=entry("data", "cuda", philox_state(0, 0))),
            """RNGState cannot load the state of generators['data'] in index_1 into a cpu generator: it is that of a cuda generator. Pass a cuda generator under this name.""",
        )

    def test_from_cpu_to_cuda(self):
        self.check(
            self.saved(noise=entry("noise", "cpu", self.data.get_state())),
            """RNGState cannot load the state of generators['noise'] in index_1 into a cuda generator: it is that of a cpu generator. Pass a cpu generator under this name.""",
        )

    def test_bytes_that_were_not_saved(self):
        name, device_type, state, digest = entry("data", "cpu", self.data.get_state())
        self.check(
            self.saved(data=(name, device_type, state[:3000] + bytes(500) + state[3500:], digest)),
            """RNGState cannot load the state of generators['data'] in index_1: it is torn, not what was saved. Load another checkpoint.""",
        )

    def test_a_state_of_another_length(self):
        self.check(
            self.saved(data=entry("data", "cpu", self.data.get_state()[:5000])),
            """RNGState cannot load the state of generators['data'] in index_1: Expected a CPUGeneratorImplState of size 5056 but found the input RNG state size to be 5000. Load another checkpoint.""",
        )

    def test_an_empty_state(self):
        self.check(
            self.saved(data=entry("data", "cpu", torch.empty(0, dtype=torch.uint8))),
            """RNGState cannot load the state of generators['data'] in index_1: Expected a CPUGeneratorImplState of size 5056 but found the input RNG state size to be 0. Load another checkpoint.""",
        )

    def test_a_state_that_is_none_of_mt19937(self):
        state = self.data.get_state()
        state[8:16] = 255  # how many words are left before the next turn
        self.check(
            self.saved(data=entry("data", "cpu", state)),
            """RNGState cannot load the state of generators['data'] in index_1: Invalid mt19937 state. Load another checkpoint.""",
        )

    def test_a_philox_state_of_another_length(self):
        self.check(
            self.saved(noise=entry("noise", "cuda", philox_state(7, 12)[:8])),
            """RNGState cannot load the state of generators['noise'] in index_1: a Philox state has 16 bytes, found 8. Load another checkpoint.""",
        )

    def test_a_philox_offset_between_two_calls(self):
        self.check(
            self.saved(noise=entry("noise", "cuda", philox_state(7, 13))),
            """RNGState cannot load the state of generators['noise'] in index_1: a Philox offset is a multiple of 4 and not below 0, found 13. Load another checkpoint.""",
        )

    def test_a_philox_offset_below_zero(self):
        self.check(
            self.saved(noise=entry("noise", "cuda", philox_state(7, -4))),
            """RNGState cannot load the state of generators['noise'] in index_1: a Philox offset is a multiple of 4 and not below 0, found -4. Load another checkpoint.""",
        )

    def test_something_else(self):
        self.check(
            {"index_1": torch.zeros(5056, dtype=torch.uint8)},
            """RNGState expects index_1 to be what RNGState.state_dict() put there, found something else.""",
        )

    def test_a_state_that_is_a_tensor(self):
        self.check(
            self.saved(data=("data", "cpu", self.data.get_state().float(), b"")),
            """RNGState expects index_1 to be what RNGState.state_dict() put there, found something else.""",
        )

    def test_names_that_are_no_dims_of_the_mesh(self):
        with self.assertRaises(ValueError) as caught:
            RNGState(None, self.mesh, ("dp", "ep"))
        self.assertExpectedInline(
            str(caught.exception),
            """RNGState expects distinct_dims among the dims of device_mesh, found 'ep' and a device_mesh with dims ('dp', 'pp')""",
        )
        with self.assertRaises(ValueError) as caught:
            RNGState(distinct_dims="pp")
        self.assertExpectedInline(
            str(caught.exception),
            """RNGState expects distinct_dims among the dims of device_mesh, found 'pp' and no device_mesh""",
        )
