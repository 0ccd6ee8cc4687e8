"""Which global indices a local tensor holds."""

from collections.abc import Iterable, Sequence

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
