"""Who holds which part of a DTensor, and where the next draw takes its numbers from, as text."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed._local_tensor import enabled_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _random, _shard, _sync
from ._draw import default_generator

_SHARDS = 64
_PARTS = 8


def describe(dtensor: DTensor, generator: torch.Generator | None = None) -> str:
    """Who holds which part of a DTensor, and where its next draw of one value an element (``uniform_()``) takes its numbers
    from under policy ``"offset"``, as a text table.

    One row for each shard, in the order of their indices, the first 64: the global ranks that hold it, where they are on
    the mesh (``:`` along dims that do not tell shards apart), the slice of the global tensor, and the shard's index. On
    CUDA then the offsets of the generator that are the shard's own, and in the last line where every rank ends. On the
    CPU the key, which all ranks draw from the generator alike, and which is mixed with the shard's index.

    Nothing changes: no generator moves. Does not communicate. Where there is no such device (``meta`` tensors, fake
    process groups), offsets count from the generator's own.

    Args:
        dtensor (:class:`DTensor`): the DTensor to describe, on any rank, also one outside its mesh.
        generator (:class:`torch.Generator`): the generator to draw from. Default: the default one of the local tensor's
            device; for a ``meta`` tensor, of the mesh's.

    Returns:
        str: the table; the same on every rank whose generator is in step.

    Raises:
        RuntimeError: ``generator`` is of another device type than the local tensor.
        TypeError: ``dtensor`` is not a :class:`DTensor`.

    Example::

        >>> print(torch_dtensor_rng.describe(model.layers[0].weight))
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(
            f"describe expects dtensor to be a DTensor, found {type(dtensor).__name__}: a plain tensor has no placements, "
            "and is drawn as a whole."
        )
    local, mesh = dtensor._local_tensor, dtensor._spec.mesh
    device = torch.device(mesh.device_type) if local.is_meta else local.device
    with _disable_current_modes(), _first_simulated_rank(generator):
        if device.type == "cpu":
            source: _Key | _Offsets = _key(generator, device)
        else:
            source = _offsets(generator, device)
        return _table(dtensor, source)


# ---------------------------------------------------------------------------------------------------------------------
# What a shard draws from.
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """The key that the next op on a sharded CPU tensor draws from a generator."""

    name: str
    key: int
    before: _sync.GeneratorState
    after: _sync.GeneratorState

    head: ClassVar[str] = "draws from"

    def of(self, layout: _random._ShardLayout, index: int) -> str:
        return "the generator" if layout.num_shards == 1 else f"(key, {index})"

    def total(self, layout: _random._ShardLayout) -> str:
        if layout.num_shards == 1:
            return f"Every rank draws from {self.name}, at {self.before}, as the plain call does."
        return f"The key is {self.key:#018x}, the next 64 bits of {self.name}, which goes from {self.before} to {self.after}."


@dataclass(frozen=True)
class _Offsets:
    """Philox offsets, as they count from ``base``, which is None where there is no generator."""

    name: str
    seed: int | None
    base: int | None

    head: ClassVar[str] = "offsets"

    def _at(self, offset: int) -> str:
        return f"+{offset}" if self.base is None else str(self.base + offset)

    def of(self, layout: _random._ShardLayout, index: int) -> str:
        start, stop = (_random._round_up_to_4(i * layout.step) for i in (index, index + 1))
        return f"{self._at(start)}..{self._at(min(stop, layout.end))}"

    def total(self, layout: _random._ShardLayout) -> str:
        if self.base is None:
            return f"Every rank ends {self._at(layout.end)} from where {self.name} is."
        return f"Every rank goes from offset {self._at(0)} of {self.name}, seed {self.seed}, to {self._at(layout.end)}."


def _name(generator: torch.Generator | None, device: torch.device) -> str:
    return f"the default {device.type} generator" if generator is None else "the generator that was passed"


def _key(generator: torch.Generator | None, device: torch.device) -> _Key:
    live = default_generator(generator, device)
    peek = live.clone_state()
    mt19937 = _random._get_mt19937()
    mt19937.draw_state(peek, 0)
    key = mt19937.key_array.item() & _random._UINT64
    return _Key(_name(generator, device), key, _sync.state_of(live), _sync.state_of(peek))


def _offsets(generator: torch.Generator | None, device: torch.device) -> _Offsets:
    handle = _get_device_handle(device.type)
    if generator is None and not (handle and handle.is_available()):
        return _Offsets(_name(generator, device), None, None)
    live = default_generator(generator, device)
    return _Offsets(_name(generator, device), live.initial_seed(), live.get_offset())


@contextlib.contextmanager
def _first_simulated_rank(generator: torch.Generator | None) -> Iterator[None]:
    """LocalTensorMode keeps a state for each rank that it plays: the default generators are in that of the first one."""
    mode = enabled_local_tensor_mode()
    if generator is not None or mode is None or not mode._per_rank_rng_states:
        yield
        return
    from torch.distributed import _local_tensor

    ours = _local_tensor._get_rng_state()
    try:
        _local_tensor._set_rng_state(*mode._per_rank_rng_states[min(mode.ranks)])
        yield
    finally:
        _local_tensor._set_rng_state(*ours)


# ---------------------------------------------------------------------------------------------------------------------
# The table.
# ---------------------------------------------------------------------------------------------------------------------


def _table(dtensor: DTensor, source: _Key | _Offsets) -> str:
    spec = dtensor._spec
    layout = _random._layout_for(spec)
    rows = [("ranks", f"({', '.join(_sync._dim_names(spec.mesh))})", "holds", "shard", source.head)]
    ranks = spec.mesh.mesh
    for index in range(min(layout.num_shards, _SHARDS)):
        place = _place(layout, spec.mesh, index)
        held = _shard.held_ranges(spec, [at or 0 for at in place])
        rows.append(
            (
                _ranks_text(ranks[tuple(slice(None) if at is None else at for at in place)].flatten().tolist()),
                f"({', '.join(':' if at is None else str(at) for at in place)})",
                _slice_text(held, spec.shape),
                str(index),
                source.of(layout, index) if all(held) else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    if layout.num_shards > _SHARDS:
        lines.append(f"... and {layout.num_shards - _SHARDS} more shards")
    return "\n".join([_header(dtensor), "", *lines, "", source.total(layout)])


def _place(layout: _random._ShardLayout, mesh: DeviceMesh, index: int) -> list[int | None]:
    """Where on the mesh the shard is; None along dims whose ranks all hold it."""
    return [index // weight % size if weight else None for weight, size in zip(layout.weights, mesh.shape)]


def _header(dtensor: DTensor) -> str:
    spec = dtensor._spec
    placements = ", ".join(map(str, spec.placements))
    partial = ""
    if any(placement.is_partial() for placement in spec.placements):
        partial = "; Partial: functional draws reduce it first, draws in place raise"
    return (
        f"DTensor of shape {tuple(spec.shape)}, {dtensor.dtype} on {dtensor._local_tensor.device.type}, "
        f"and placements [{placements}] on {_sync._mesh_text(spec.mesh)}{partial}"
    )


def _ranks_text(ranks: list[int]) -> str:
    runs = _sync.ranges(ranks).split(", ")
    return ", ".join(runs) if len(runs) <= _PARTS else f"{', '.join(runs[:_PARTS])}, ... ({len(ranks)} ranks)"


def _slice_text(held: tuple[tuple[_shard.Range, ...], ...], shape: torch.Size) -> str:
    return f"[{', '.join(map(_dim_text, held, shape))}]" if all(held) else "-"


def _dim_text(ranges: tuple[_shard.Range, ...], size: int) -> str:
    if ranges == ((0, size),):
        return ":"
    parts = [f"{start}:{stop}" for start, stop in ranges]
    return "+".join(parts) if len(parts) <= _PARTS else f"{'+'.join(parts[:_PARTS])}+... ({len(parts)} ranges)"
