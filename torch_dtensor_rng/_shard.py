"""Which part of a tensor a local tensor holds."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from . import _random

Range = tuple[int, int]


def held_ranges(spec: DTensorSpec, coordinate: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
    """For each dim of the global tensor, the ranges [start, stop) of global indices that the local tensor of the rank at
    ``coordinate`` of the mesh holds, in local order: ascending, apart, none of them empty. The local size of the dim is
    the sum of their lengths. Needs no process group, and memory only for the ranges. Does not communicate.

    Args:
        spec (DTensorSpec): the sharding of a tensor; of its mesh only the shape is read.
        coordinate (sequence of int): where on the mesh the rank is.
    """
    mesh_dims = _random._sharding_mesh_dims(len(spec.shape), spec.placements)
    for entry in spec.shard_order or ():  # none where a _StridedShard stands for the order
        mesh_dims[entry.tensor_dim] = list(entry.mesh_dims)
    held = []
    for size, sharding in zip(spec.shape, mesh_dims):
        ranges: tuple[Range, ...] = _merged([(0, size)])
        for mesh_dim in sharding:
            size = sum(stop - start for start, stop in ranges)
            pieces = _pieces(spec.placements[mesh_dim], size, spec.mesh.shape[mesh_dim], coordinate[mesh_dim])
            ranges = _merged(part for piece in pieces for part in _cut(ranges, piece))
        held.append(ranges)
    return tuple(held)


def _pieces(placement: Placement, size: int, ranks: int, rank: int) -> list[Range]:
    """The pieces of a dim of ``size`` that ``rank`` of ``ranks`` holds. A ``_StridedShard`` (its ``_split_tensor``) splits
    the dim into ``split_factor`` chunks, and every one of these among the ranks."""
    chunks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    pieces = []
    for chunk in range(chunks):
        length, at = Shard.local_shard_size_and_offset(size, chunks, chunk)
        held, start = Shard.local_shard_size_and_offset(length, ranks, rank)
        pieces.append((at + start, at + start + held))
    return pieces


def _cut(ranges: Sequence[Range], piece: Range) -> Iterable[Range]:
    """What ``ranges``, one after another, have between the places of ``piece``."""
    at = 0
    for start, stop in ranges:
        first, last = max(start, start + piece[0] - at), min(stop, start + piece[1] - at)
        if first < last:
            yield first, last
        at += stop - start


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """``ranges`` without empty ones, adjacent ones as one."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        if start < stop:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """What a local tensor holds of a tensor, dims in the order of memory: the largest stride first.

    ``order`` are the tensor's dims in that order; ``shape`` and ``stride`` are the whole tensor's, and ``ranges`` the
    held global indices of each dim, ascending. ``ready`` are the fused fills that have served it.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    ready: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def numel(self) -> int:
        """The elements of the whole."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the whole fills its memory without holes, so that its elements lie there in order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def is_contiguous(self) -> bool:
        """Whether the whole is dense, and memory order the order of its dims."""
        order = [dim for dim, size in zip(self.order, self.shape) if size > 1]
        return self.is_dense and order == sorted(order)


def shard_of(spec: DTensorSpec, coordinate: Sequence[int]) -> ShardSlice:
    """The shard of the rank at ``coordinate`` of the mesh. A kernel goes through memory by stride, the largest first
    (``TensorIteratorBase::reorder_dimensions`` in ATen/TensorIterator.cpp)."""
    stride = spec.tensor_meta.stride  # type: ignore[union-attr]
    order = tuple(sorted(range(len(spec.shape)), key=lambda dim: -stride[dim]))
    held = held_ranges(spec, coordinate)
    return ShardSlice(
        order,
        tuple(spec.shape[dim] for dim in order),
        tuple(stride[dim] for dim in order),
        tuple(held[dim] for dim in order),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Boxes: the elements [begin, end) of a tensor in memory order, as slices of its dims.
# ---------------------------------------------------------------------------------------------------------------------

Box = tuple[tuple[int, int], ...]


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The elements [begin, end) of a row-major tensor, in order, as boxes of (start, stop) a dim. Each box is a run."""
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    whole = tuple((0, size) for size in shape[1:])
    if first == last and (begin, end) != (first * row, first * row + row):
        for box in boxes(shape[1:], begin - first * row, end - first * row):
            yield ((first, first + 1), *box)
        return
    start = -(-begin // row)
    stop = end // row
    if begin < start * row:
        yield from boxes(shape, begin, start * row)
    if start < stop:
        yield ((start, stop), *whole)
    if stop * row < end:
        yield from boxes(shape, stop * row, end)


def overlaps(shard: ShardSlice, box: Box) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """What the shard holds of a box: pairs of an index into the box and one into the local tensor."""
    by_dim = []
    for (start, stop), ranges in zip(box, shard.ranges):
        pairs, local = [], 0
        for first, end in ranges:
            low, high = max(first, start), min(end, stop)
            if low < high:
                pairs.append((slice(low - start, high - start), slice(local + low - first, local + high - first)))
            local += end - first
        by_dim.append(pairs)
    return [(tuple(one for one, _ in index), tuple(one for _, one in index)) for index in itertools.product(*by_dim)]


class Held(NamedTuple):
    """A part of the elements [begin, end) of the whole that the shard holds."""

    span: slice
    sizes: tuple[int, ...]
    of_box: tuple[slice, ...]
    of_local: tuple[slice, ...]

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """The part of ``elements``, which are those from ``begin`` on."""
        return elements[self.span].view(self.sizes)[self.of_box]


def held_in(shard: ShardSlice, begin: int, end: int) -> list[Held]:
    held, at = [], 0
    for box in boxes(shard.shape, begin, end):
        sizes = tuple(stop - start for start, stop in box)
        span = slice(at, at + math.prod(sizes))
        at = span.stop
        held += [Held(span, sizes, *indices) for indices in overlaps(shard, box)]
    return held


def runs_of(shard: ShardSlice) -> tuple[int, Iterator[tuple[int, int]]]:
    """The runs of elements in memory order that the shard holds, in order: the length of the shortest, and where each
    begins and ends. A run is not always as long as it could be."""
    dim = len(shard.shape)
    while dim and shard.ranges[dim - 1] == ((0, shard.shape[dim - 1]),):
        dim -= 1
    row = math.prod(shard.shape[dim:])
    if not dim:
        return row, iter([(0, row)])
    ranges = shard.ranges[dim - 1]
    shortest = min((end - first for first, end in ranges), default=0) * row

    def each() -> Iterator[tuple[int, int]]:
        leading = [[i for first, end in one for i in range(first, end)] for one in shard.ranges[: dim - 1]]
        for index in itertools.product(*leading):
            before = 0
            for i, size in zip((*index, 0), shard.shape[:dim]):
                before = before * size + i
            for first, end in ranges:
                yield (before + first) * row, (before + end) * row

    return shortest, each()
