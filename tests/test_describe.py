"""What describe() shows is what real draws use, and it changes nothing."""

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import expecttest
import pytest
import torch
import torch.distributed.tensor._random as torch_random
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import as_rank, default_generator, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _random
from torch_dtensor_rng._describe import describe


def dtensor_of(
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
    mesh: DeviceMesh,
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
) -> DTensor:
    """A DTensor of any global shape, whose local tensor is not looked at."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), dtype))
    return DTensor(torch.empty(0, dtype=dtype, device=device), spec, requires_grad=False)


class Row(NamedTuple):
    ranks: list[int]
    at: str
    holds: str
    shard: int
    source: str


def parsed(text: str) -> tuple[str, list[Row], str]:
    """The header, the rows and the last line."""
    header, table, last = text.split("\n\n")
    rows = []
    for line in table.splitlines()[1:]:
        if not line.startswith("..."):
            ranks, at, holds, shard, source = re.split(" {2,}", line)
            runs = [[int(end) for end in run.split("-")] for run in ranks.split(", ")]
            rows.append(Row([r for run in runs for r in range(run[0], run[-1] + 1)], at, holds, int(shard), source))
    return header, rows, last


def picked(whole: torch.Tensor, holds: str) -> torch.Tensor:
    """The part of ``whole`` that ``holds`` names, for parts that hold anything."""
    for dim, text in enumerate(holds[1:-1].split(", ")):
        edges = [[int(edge) for edge in one.split(":")] for one in text.split("+")] if text != ":" else None
        if edges is not None:
            whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in edges], dim)
    return whole


def row_of(rows: list[Row], rank: int) -> Row:
    (row,) = (row for row in rows if rank in row.ranks)
    return row


SHARDINGS = [
    ((13, 6), (4,), (Shard(0),)),
    ((5, 2), (4,), (Shard(0),)),
    ((13, 6), (2, 2), (Replicate(), Shard(1))),
    ((13, 6), (2, 2), (Shard(1), Shard(0))),
    ((9, 4), (2, 2), (Shard(0), Shard(0))),
    ((13, 4), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
    ((13, 4), (2, 2), (Replicate(), _StridedShard(0, split_factor=3))),
]


@pytest.mark.parametrize("passed", [False, True], ids=["default", "passed"])
@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), SHARDINGS)
def test_every_cpu_rank_holds_and_draws_what_is_shown(shape, mesh_shape, placements, passed):
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    texts = set()

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        generator = torch.Generator() if passed else torch.default_generator
        generator.manual_seed(11)
        torch.rand(3, generator=generator)
        x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        text = describe(x, generator if passed else None)
        texts.add(text)
        _, rows, last = parsed(text)
        row = row_of(rows, rank)
        held = x.to_local().clone()
        x.uniform_(generator=generator if passed else None)
        assert last.endswith(f" to {tdr._sync.state_of(generator)}.")
        if row.holds == "-":
            assert not held.numel() and row.source == "-"
            return
        assert torch.equal(picked(whole, row.holds), held)
        key = int(re.search("0x[0-9a-f]{16}", last)[0], 16)
        assert row.source == f"(key, {row.shard})"
        replay = torch.Generator()
        replay.set_state(_random._get_mt19937().mixed_state(key, row.shard))
        assert torch.equal(torch.empty_like(held).uniform_(generator=replay), x.to_local())

    with tdr.install():
        each_rank(mesh_shape, on_rank)
    assert len(texts) == 1, "every rank says the same"


def test_a_replicated_cpu_tensor_draws_from_the_generator_itself():
    torch.manual_seed(5)
    mesh = as_rank(1, (2,))
    x = empty(3, device_mesh=mesh, placements=[Replicate()])
    _, (row,), last = parsed(describe(x))
    assert row == ([0, 1], "(:)", "[:]", 0, "the generator")
    assert f"at {tdr._sync.state_of(torch.default_generator)}," in last


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), SHARDINGS[:1] + SHARDINGS[2:4])
def test_offsets_are_those_of_torchs_tracker(shape, mesh_shape, placements):
    """Where torch's tracker keeps shards and ops apart."""
    torchs = torch_random.OffsetBasedRNGTracker.__new__(torch_random.OffsetBasedRNGTracker)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
        x = dtensor_of(shape, placements, mesh)
        _, rows, last = parsed(describe(x))
        assert [row.shard for row in rows] == list(range(len(rows)))
        edges = [tuple(int(at) for at in row.source.split("..")) for row in rows]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(edges)), "one after the other"
        state = SimpleNamespace(offset=0)
        torchs._set_pre_op_offset(state, x._spec)
        assert row_of(rows, rank).source.split("..")[0] == f"+{state.offset}"
        torchs._set_post_op_offset(state, x._spec, 0)
        assert f"ends +{state.offset} from" in last and edges[-1][1] == state.offset
        return edges[row_of(rows, rank).shard]

    starts = {start for start, _ in each_rank(mesh_shape, on_rank, "cuda")}
    assert len(starts) == math.prod(n for n, one in zip(mesh_shape, placements) if one.is_shard())


def test_the_room_of_a_shard_holds_its_elements():
    """Plain arithmetic, where torch's own places fall together or run past the end: small shards, and empty ones."""
    mesh = as_rank(0, (2, 4), "cuda")
    _, rows, last = parsed(describe(dtensor_of((9,), (Shard(0), Shard(0)), mesh)))
    assert [(row.holds, row.source) for row in rows] == [
        ("[0:2]", "+0..+4"),
        ("[2:4]", "+4..+8"),
        ("[4:5]", "+8..+12"),
        ("-", "-"),
        ("[5:6]", "+16..+20"),
        ("[6:7]", "+20..+24"),
        ("[7:8]", "+24..+28"),
        ("[8:9]", "+28..+32"),
    ]
    assert "ends +32 from" in last


def test_offsets_count_from_where_the_generator_is():
    """A stand-in for a CUDA generator, where there is no CUDA."""
    generator: Any = SimpleNamespace(device=torch.device("cuda:0"), initial_seed=lambda: 7, get_offset=lambda: 128)
    mesh = as_rank(0, (2,), "cuda")
    _, rows, last = parsed(describe(dtensor_of((8, 4), (Shard(0),), mesh), generator))
    assert [row.source for row in rows] == ["128..144", "144..160"]
    assert last == "Every rank goes from offset 128 of the generator that was passed, seed 7, to 160."


@pytest.mark.gpu
def test_every_cuda_rank_draws_at_the_offsets_that_are_shown():
    generator = default_generator("cuda")

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        generator.manual_seed(7)
        torch.rand(100, device="cuda")
        base = generator.get_offset()
        x = empty(13, 6, device_mesh=mesh, placements=[Shard(1), Shard(0)])
        _, rows, last = parsed(describe(x))
        assert generator.get_offset() == base
        start, stop = map(int, row_of(rows, rank).source.split(".."))
        assert base <= start < stop
        x.uniform_()
        assert f"from offset {base} of the default cuda generator, seed 7, to {generator.get_offset()}." in last
        replay = torch.Generator("cuda").manual_seed(7)
        replay.set_offset(start)
        assert torch.equal(torch.empty_like(x.to_local()).uniform_(generator=replay), x.to_local())
        assert replay.get_offset() <= stop

    with tdr.install():
        each_rank((2, 2), on_rank, "cuda")


def test_nothing_changes_and_nothing_is_communicated():
    torch.manual_seed(1)
    mesh = as_rank(0, (2, 2))
    x = empty(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    partial = DTensor.from_local(torch.ones(8, 4), mesh, [Partial(), Shard(0)])
    passed = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), passed.get_state(), _random._get_mt19937().generator.get_state()
    with CommDebugMode() as communication:
        texts = [describe(one, generator) for one in (x, partial) for generator in (None, passed)]
    assert communication.get_total_counts() == 0
    after = torch.get_rng_state(), passed.get_state(), _random._get_mt19937().generator.get_state()
    assert all(map(torch.equal, before, after))
    assert texts == [describe(one, generator) for one in (x, partial) for generator in (None, passed)]
    assert len(set(texts)) == 4


def test_a_rank_outside_the_mesh_says_the_same():
    texts = set()
    for rank in range(4):
        as_rank(rank, (4,))
        torch.manual_seed(9)
        texts.add(describe(empty(8, 4, device_mesh=DeviceMesh("cpu", [2, 1]), placements=[Shard(0)])))
    (text,) = texts
    assert [(row.ranks, row.holds) for row in parsed(text)[1]] == [([2], "[0:4, :]"), ([1], "[4:8, :]")]


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_device_is_that_of_the_local_tensor(offloaded):
    """A shard that is offloaded to the CPU has a key, one without memory the mesh's offsets."""
    mesh = as_rank(0, (2,), "cuda")
    _, rows, last = parsed(describe(dtensor_of((8, 4), (Shard(0),), mesh, "cpu" if offloaded else "meta")))
    assert [row.source for row in rows] == (["(key, 0)", "(key, 1)"] if offloaded else ["+0..+16", "+16..+32"])
    assert f"the default {'cpu' if offloaded else 'cuda'} generator" in last


def test_fake_tensors():
    torch.manual_seed(2)
    mesh = as_rank(0, (2,))
    real = describe(empty(8, 4, device_mesh=mesh, placements=[Shard(0)]))
    with FakeTensorMode():
        x = empty(8, 4, device_mesh=mesh, placements=[Shard(0)])
        assert describe(x) == real


def test_local_tensor_mode():
    """It keeps a state for each rank that it plays, and the live generator stays behind."""
    as_rank(0, (4,))
    with tdr.install(), LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(3)
        x = empty(8, 2, device_mesh=mesh, placements=[Shard(0)])
        x.uniform_()
        live = torch.default_generator.get_state()
        _, rows, last = parsed(describe(x))
        assert torch.equal(live, torch.default_generator.get_state())
        x.uniform_()
        key = int(re.search("0x[0-9a-f]{16}", last)[0], 16)
        drawn = {rank: x._local_tensor._local_tensors[rank].clone() for rank in range(4)}
    for rank, values in drawn.items():
        replay = torch.Generator()
        replay.set_state(_random._get_mt19937().mixed_state(key, row_of(rows, rank).shard))
        assert torch.equal(torch.empty(2, 2).uniform_(generator=replay), values)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())],
)
def test_65536_ranks(placements):
    mesh = DeviceMesh("cuda", torch.arange(65536).reshape(256, 256), _init_backend=False, _rank=0)
    text = describe(dtensor_of((1 << 20, 4096), placements, mesh))
    shards = 256 ** sum(one.is_shard() for one in placements)
    lines = text.splitlines()
    assert len(lines) == (64 + 6 if shards > 64 else 3 + shards + 2)
    assert (f"... and {shards - 64} more shards" in lines) == (shards > 64)
    assert len(text) < 10_000


def test_what_is_refused():
    mesh = as_rank(0, (2,), "cuda")
    x = dtensor_of((8, 4), (Shard(0),), mesh)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        describe(x, torch.Generator())
    with pytest.raises(TypeError, match="describe expects dtensor to be a DTensor, found Parameter"):
        describe(torch.nn.Parameter(torch.ones(2)))


class TestTexts(expecttest.TestCase):
    def setUp(self):
        torch.manual_seed(2026)

    def test_a_cpu_tensor(self):
        mesh = as_rank(0, (2, 2), names=("dp", "tp"))
        x = empty(10, 4, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0), Replicate()])
        self.assertExpectedInline(
            describe(x),
            """\
DTensor of shape (10, 4), torch.bfloat16 on cpu, and placements [S(0), R] on the cpu mesh (dp 2, tp 2) of ranks 0-3

ranks  (dp, tp)  holds      shard  draws from
0-1    (0, :)    [0:5, :]   0      (key, 0)
2-3    (1, :)    [5:10, :]  1      (key, 1)

The key is 0x38270901c4407d86, the next 64 bits of the default cpu generator, which goes from state 8921cecd4e36a4c3 to state b5f237efd790abd6.""",
        )

    def test_a_replicated_cpu_tensor_and_a_passed_generator(self):
        mesh = as_rank(0, (2, 2), names=("dp", "tp"))
        x = empty(10, 4, device_mesh=mesh, placements=[Replicate(), Replicate()])
        self.assertExpectedInline(
            describe(x, torch.Generator().manual_seed(3)),
            """\
DTensor of shape (10, 4), torch.float32 on cpu, and placements [R, R] on the cpu mesh (dp 2, tp 2) of ranks 0-3

ranks  (dp, tp)  holds   shard  draws from
0-3    (:, :)    [:, :]  0      the generator

Every rank draws from the generator that was passed, at state 9af8accdcec411bd, as the plain call does.""",
        )

    def test_a_partial_tensor(self):
        mesh = as_rank(0, (2, 2), names=("dp", "tp"))
        x = DTensor.from_local(torch.zeros(3, 4), mesh, [Partial(), Shard(1)])
        self.assertExpectedInline(
            describe(x),
            """\
DTensor of shape (3, 8), torch.float32 on cpu, and placements [P(sum), S(1)] on the cpu mesh (dp 2, tp 2) of ranks 0-3; Partial: functional draws reduce it first, draws in place raise

ranks  (dp, tp)  holds     shard  draws from
0, 2   (:, 0)    [:, 0:4]  0      (key, 0)
1, 3   (:, 1)    [:, 4:8]  1      (key, 1)

The key is 0x38270901c4407d86, the next 64 bits of the default cpu generator, which goes from state 8921cecd4e36a4c3 to state b5f237efd790abd6.""",
        )

    def test_fsdp2_over_tensor_parallelism(self):
        mesh = as_rank(0, (2, 3), "cuda", names=("dp", "tp"))
        x = dtensor_of((100, 16), (_StridedShard(0, split_factor=3), Shard(0)), mesh)
        self.assertExpectedInline(
            describe(x),
            """\
DTensor of shape (100, 16), torch.float32 on meta, and placements [_S(0, 3), S(0)] on the cuda mesh (dp 2, tp 3) of ranks 0-5

ranks  (dp, tp)  holds        shard  offsets
0      (0, 0)    [0:17, :]    0      +0..+272
1      (0, 1)    [34:51, :]   1      +272..+544
2      (0, 2)    [68:84, :]   2      +544..+816
3      (1, 0)    [17:34, :]   3      +816..+1088
4      (1, 1)    [51:68, :]   4      +1088..+1360
5      (1, 2)    [84:100, :]  5      +1360..+1600

Every rank ends +1600 from where the default cuda generator is.""",
        )

    def test_several_ranges_empty_shards_and_a_mesh_without_names(self):
        mesh = as_rank(0, (2, 4), "cuda")
        x = dtensor_of((7, 3), (_StridedShard(0, split_factor=3), Shard(1)), mesh, dtype=torch.complex64)
        self.assertExpectedInline(
            describe(x),
            """\
DTensor of shape (7, 3), torch.complex64 on meta, and placements [_S(0, 3), S(1)] on the cuda mesh (dim 0 2, dim 1 4) of ranks 0-7

ranks  (dim 0, dim 1)  holds               shard  offsets
0      (0, 0)          [0:2+3:5+6:7, 0:1]  0      +0..+8
1      (0, 1)          [0:2+3:5+6:7, 1:2]  1      +8..+16
2      (0, 2)          [0:2+3:5+6:7, 2:3]  2      +16..+24
3      (0, 3)          -                   3      -
4      (1, 0)          [2:3+5:6, 0:1]      4      +32..+40
5      (1, 1)          [2:3+5:6, 1:2]      5      +40..+48
6      (1, 2)          [2:3+5:6, 2:3]      6      +48..+52
7      (1, 3)          -                   7      -

Every rank ends +52 from where the default cuda generator is.""",
        )

    def test_more_ranges_than_are_shown(self):
        mesh = as_rank(0, (2,), "cuda", names=("dp",))
        x = dtensor_of((40,), (_StridedShard(0, split_factor=10),), mesh)
        self.assertExpectedInline(
            describe(x),
            """\
DTensor of shape (40,), torch.float32 on meta, and placements [_S(0, 10)] on the cuda mesh (dp 2) of ranks 0-1

ranks  (dp)  holds                                                          shard  offsets
0      (0)   [0:2+4:6+8:10+12:14+16:18+20:22+24:26+28:30+... (10 ranges)]   0      +0..+20
1      (1)   [2:4+6:8+10:12+14:16+18:20+22:24+26:28+30:32+... (10 ranges)]  1      +20..+40

Every rank ends +40 from where the default cuda generator is.""",
        )

    def test_no_dims(self):
        mesh = as_rank(0, (2,), "cuda", names=("dp",))
        self.assertExpectedInline(
            describe(dtensor_of((), (Replicate(),), mesh)),
            """\
DTensor of shape (), torch.float32 on meta, and placements [R] on the cuda mesh (dp 2) of ranks 0-1

ranks  (dp)  holds  shard  offsets
0-1    (:)   []     0      +0..+4

Every rank ends +4 from where the default cuda generator is.""",
        )

    def test_many_ranks(self):
        ranks = torch.arange(4096).reshape(32, 128)
        mesh = DeviceMesh("cuda", ranks, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=0)
        lines = describe(dtensor_of((1024, 128), (Replicate(), Shard(0)), mesh)).splitlines()
        self.assertExpectedInline(
            "\n".join(lines[:5] + lines[-5:]),
            """\
DTensor of shape (1024, 128), torch.float32 on meta, and placements [R, S(0)] on the cuda mesh (dp 32, tp 128) of ranks 0-4095

ranks                                                  (dp, tp)  holds         shard  offsets
0, 128, 256, 384, 512, 640, 768, 896, ... (32 ranks)   (:, 0)    [0:8, :]      0      +0..+1024
1, 129, 257, 385, 513, 641, 769, 897, ... (32 ranks)   (:, 1)    [8:16, :]     1      +1024..+2048
62, 190, 318, 446, 574, 702, 830, 958, ... (32 ranks)  (:, 62)   [496:504, :]  62     +63488..+64512
63, 191, 319, 447, 575, 703, 831, 959, ... (32 ranks)  (:, 63)   [504:512, :]  63     +64512..+65536
... and 64 more shards

Every rank ends +131072 from where the default cuda generator is.""",
        )
