"""Where shards draw: plain functions of shapes, meshes and placements, against torch's own and against brute force."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.tensor._random as torch_random
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import coordinates

from torch_dtensor_rng import _random


class Sharding(NamedTuple):
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]

    def local_numel(self, coordinate: tuple[int, ...]) -> int:
        local, _ = _compute_local_shape_and_global_offset(
            self.shape, self.mesh_shape, list(coordinate), self.placements, skip_offset=True
        )
        return math.prod(local)

    def plans(self) -> dict[tuple[int, ...], _random._ShardPlan]:
        layout = _random._calc_layout(self.shape, self.placements, self.mesh_shape)
        return {coordinate: layout.plan(coordinate) for coordinate in coordinates(self.mesh_shape)}


@st.composite
def shardings(draw: Any, max_dim: int = 40) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(0, max_dim), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for mesh_dim in range(len(mesh_shape)):
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["shard", "shard", "replicate", "partial", "strided"]))
        # FSDP2 x TP: a mesh dim shards what later mesh dims have sharded before it.
        later = math.prod(mesh_shape[mesh_dim + 1 :])
        placements.append(
            Shard(dim) if kind == "shard"
            else _StridedShard(dim, split_factor=draw(st.sampled_from([later, 2, 3, 4]))) if kind == "strided"
            else Replicate() if kind == "replicate"
            else Partial()
        )  # fmt: skip
    return Sharding(shape, mesh_shape, tuple(placements))


FSDP_TP = Sharding((32, 4), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))


def fill_span(numel: int, values_a_call: int, multiprocessors: int) -> int:
    """The offsets that every thread of a stock fill advances: calc_execution_policy in DistributionTemplates.h, for a
    device of 2048 threads a multiprocessor."""
    if numel == 0:
        return 0
    threads = 256 * min(multiprocessors * 8, -(-numel // 256))
    return ((numel - 1) // (threads * values_a_call) + 1) * 4


def dropout_span(numel: int, vector: int, multiprocessors: int) -> int:
    """The offsets that a thread of the vectorised dropout touches: one call for every 4 of ``vector`` values a step."""
    if numel == 0:
        return 0
    threads = 256 * min(multiprocessors * 8, -(-numel // 256))
    if vector == 1 or numel % vector:
        return fill_span(numel, 4, multiprocessors)
    return ((numel - 1) // (threads * vector) + 1) * 4 * max(1, vector // 4)


SPANS = [
    *(lambda n, sms, u=u: fill_span(n, u, sms) for u in (2, 4)),
    *(lambda n, sms, v=v: dropout_span(n, v, sms) for v in (1, 2, 4, 8, 16)),
]


@settings(max_examples=400, deadline=None)
@given(shardings(), st.sampled_from(SPANS), st.sampled_from([1, 8, 132]))
@example(FSDP_TP, SPANS[1], 132)
@example(Sharding((5,), (4,), (Shard(0),)), SPANS[0], 132)
@example(Sharding((17, 33), (4, 4), (Shard(0), Shard(1))), SPANS[1], 132)
@example(Sharding((57,), (2, 5), (Shard(0), _StridedShard(0, split_factor=4))), SPANS[5], 1)
def test_no_two_shards_nor_two_ops_in_a_row_meet(sharding, span, multiprocessors):
    """Every thread of a launch is a subsequence, counted from 0, so that two draws share numbers just when their ranges
    of offsets meet."""
    ranges: dict[int, tuple[int, int]] = {}
    ends = set()
    for coordinate, plan in sharding.plans().items():
        numel = sharding.local_numel(coordinate)
        drawn = (plan.start, plan.start + span(numel, multiprocessors))
        assert plan.start % 4 == 0 and plan.end % 4 == 0
        ends.add(plan.end)
        assert 0 <= plan.index < plan.num_shards
        assert ranges.setdefault(plan.index, drawn) == drawn, "replicas draw the same"
    (end,) = ends
    nonempty = sorted(drawn for drawn in ranges.values() if drawn[0] != drawn[1])
    for (_, stop), (start, _) in itertools.pairwise([*nonempty, (end, end)]):
        assert stop <= start


def torchs_places(sharding: Sharding, coordinate: tuple[int, ...]) -> tuple[int, int]:
    """What torch's own tracker computes, by its own functions."""

    class Mesh:
        shape = sharding.mesh_shape

        @staticmethod
        def size(mesh_dim: int) -> int:
            return sharding.mesh_shape[mesh_dim]

    class Spec:
        mesh = Mesh
        shape, placements, ndim = torch.Size(sharding.shape), sharding.placements, len(sharding.shape)

    index = torch_random._calc_shard_linear_idx(*torch_random._calc_shard_info(list(coordinate), Spec))
    local = math.prod(torch_random._calc_first_shard_size(Spec))
    return (index * local + 3) // 4 * 4, (math.prod(sharding.shape) + 3) // 4 * 4


@settings(max_examples=400, deadline=None)
@given(shardings())
@example(FSDP_TP)
def test_torchs_places_wherever_they_keep_shards_and_ops_apart(sharding):
    plans = sharding.plans()
    theirs = {coordinate: torchs_places(sharding, coordinate) for coordinate in plans}
    (their_end,) = {end for _, end in theirs.values()}
    ranges = {
        plans[at].index: (start, start + _random._philox_consumption(sharding.local_numel(at)))
        for at, (start, _) in theirs.items()
        if sharding.local_numel(at)
    }
    in_order = [*sorted(ranges.values()), (their_end, their_end)]
    apart = all(stop <= start for (_, stop), (start, _) in itertools.pairwise(in_order))
    if apart:
        assert {at: (plan.start, plan.end) for at, plan in plans.items() if sharding.local_numel(at)} == {
            at: place for at, place in theirs.items() if sharding.local_numel(at)
        }


@settings(max_examples=400, deadline=None)
@given(shardings())
@example(FSDP_TP)
@example(Sharding((32,), (2, 2), (Shard(0), _StridedShard(0, split_factor=3))))
def test_the_end_is_that_of_the_global_tensor_wherever_the_pieces_are_of_one_size(sharding):
    sizes = {sharding.local_numel(at) for at in coordinates(sharding.mesh_shape)}
    if len(sizes) == 1 and min(sizes) >= 4:
        assert {plan.end for plan in sharding.plans().values()} == {(math.prod(sharding.shape) + 3) // 4 * 4}


@settings(max_examples=200, deadline=None)
@given(shardings(max_dim=9))
@example(FSDP_TP)
def test_the_last_shard_that_holds_anything(sharding):
    plans = sharding.plans()
    coordinate, numel = _random._last_nonempty_shard(sharding.shape, sharding.placements, sharding.mesh_shape)
    nonempty = {plans[at].index: sharding.local_numel(at) for at in plans if sharding.local_numel(at)}
    if nonempty:
        last = max(nonempty)
        assert (plans[tuple(coordinate)].index, numel) == (last, nonempty[last])
    else:
        assert numel == 0


@settings(max_examples=400, deadline=None)
@given(shardings())
@example(Sharding((57,), (2, 5), (Shard(0), _StridedShard(0, split_factor=4))))
def test_the_largest_shard(sharding):
    sizes = [sharding.local_numel(at) for at in coordinates(sharding.mesh_shape)]
    assert max(sizes) == _random._largest_numel(sharding.shape, sharding.placements, sharding.mesh_shape)


def test_places_cost_the_same_on_a_mesh_of_any_size():
    """65,536 ranks, a dim that does not divide: a handful of steps, not a walk over the ranks."""
    layout = _random._calc_layout((5_000_000, 7), (Shard(0), Shard(0)), (8192, 8))
    assert layout.num_shards == 65536
    assert layout.plan((8191, 7)).index == 65535


@pytest.mark.parametrize(
    ("sharding", "torchs_end", "our_end"),
    [
        # An even sharding, and uneven ones of one tensor dim: torch's end.
        (Sharding((16, 6), (4,), (Shard(0),)), 96, 96),
        (Sharding((10, 6), (4,), (Shard(0),)), 60, 60),
        (Sharding((5, 8), (8,), (Shard(0),)), 40, 40),
        # FSDP2 x TP on one dim, where torch's last shards lie past its end: the true size of a shard fits.
        (FSDP_TP, 128, 128),
        (Sharding((17, 33), (4, 4), (Shard(0), Shard(1))), 564, 684),
        # Shards of one element: torch's places fall together.
        (Sharding((5,), (5,), (Shard(0),)), 8, 20),
    ],
)
def test_where_the_end_is(sharding, torchs_end, our_end):
    at = (0,) * len(sharding.mesh_shape)
    assert (torchs_places(sharding, at)[1], sharding.plans()[at].end) == (torchs_end, our_end)


def test_splitmix64_known_answers():
    """The first outputs of the generator of Steele, Lea and Flood seeded with 1234567."""
    gamma, mask = _random._GOLDEN_GAMMA, (1 << 64) - 1
    outputs = [_random._splitmix64((1234567 + i * gamma) & mask) for i in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(-(1 << 63), (1 << 63) - 1), st.lists(st.integers(0, 1 << 20), min_size=2, max_size=6, unique=True))
def test_cpu_streams_of_one_key_differ_in_every_shard(key, indices):
    mt19937 = _random._get_mt19937()
    streams = []
    for index in indices:
        generator = torch.Generator()
        generator.set_state(mt19937.mixed_state(key, index))
        streams.append(torch.empty(64, dtype=torch.int64).random_(generator=generator))
    for one, other in itertools.combinations(streams, 2):
        assert (one == other).sum() == 0


def test_all_64_bits_of_a_key_count():
    """``manual_seed`` would drop the upper half of it."""
    mt19937 = _random._get_mt19937()
    draws = set()
    for key in [0, *(1 << bit for bit in range(63)), -(1 << 63)]:
        generator = torch.Generator()
        generator.set_state(mt19937.mixed_state(key, 0))
        draws.add(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    assert len(draws) == 65
    assert torch.equal(
        torch.rand(4, generator=torch.Generator().manual_seed(1)),
        torch.rand(4, generator=torch.Generator().manual_seed(1 + (1 << 32))),
    )


def tempered(word: int) -> int:
    """The output function of mt19937: M. Matsumoto, T. Nishimura, "Mersenne Twister", TOMACS 8(1), 1998."""
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_cpu_stream_by_plain_integers(arrays, monkeypatch):
    """The first words that a shard draws, worked out without arrays; and a torch without numpy draws the same."""
    if arrays == "torch":
        monkeypatch.setattr(_random, "_as_array", lambda tensor: tensor)
    key, index, mask = -(3**39), 5, (1 << 64) - 1
    generator = torch.Generator()
    generator.set_state(_random._Mt19937().mixed_state(key, index))
    drawn = torch.empty(622, dtype=torch.int32).random_(generator=generator).tolist()  # 31 bits of a word each
    z = _random._splitmix64((key + (index + 1) * 0x9E3779B97F4A7C15) & mask)
    factors = [_random._splitmix64(j * 0x9E3779B97F4A7C15 & mask) | 1 for j in range(1, 623)]
    assert drawn == [tempered((factor * z & mask) >> 32) % (1 << 31) for factor in factors]


@settings(max_examples=300, deadline=None)
@given(shardings())
@example(FSDP_TP)
def test_sizes_of_shards_are_torchs(sharding):
    for coordinate in coordinates(sharding.mesh_shape):
        ours = _random._local_numel(sharding.shape, sharding.placements, sharding.mesh_shape, list(coordinate))
        assert ours == sharding.local_numel(coordinate)


@pytest.mark.parametrize("size", [37, 36, 5, 13])
def test_another_order_of_the_mesh_dims_stays_inside(size):
    """``shard_order``: the last shard in number need not be the last piece of the dim."""
    mesh = DeviceMesh("cpu", torch.arange(12).reshape(4, 3), _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size((size, 5)), (5, 1), torch.float32)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    layout = _random._layout_for(spec)
    ends = [0]
    for coordinate in coordinates((4, 3)):
        plan = layout.plan(coordinate)
        parts = [one.shape[0] for one in torch.empty(size, 5, device="meta").chunk(3)] + [0] * 3
        numel = -(-parts[coordinate[1]] // 4) * 5  # at most
        assert ends[-1] <= plan.start
        ends.append(plan.start + _random._philox_consumption(numel))
    assert ends[-1] <= layout.end
