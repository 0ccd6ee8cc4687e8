"""Whether the ranks of a mesh are in step: the same generator state on all of them.

In step costs one all-reduce of 16 bytes a mesh dim. Only when that finds a difference, one all-gather a mesh dim
tells every rank the state of all, so that all of them raise the same error and nobody is left waiting.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import enabled_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from . import _random


class GeneratorState(NamedTuple):
    """A generator's state as three integers: ``kind`` 1 is a Philox generator, ``a`` its seed and ``b`` its offset;
    ``kind`` 0 is any other one, ``a`` and ``b`` a hash of its state."""

    kind: int
    a: int
    b: int

    def __str__(self) -> str:
        if self.kind == _PHILOX:
            return f"seed {self.a & _random._UINT64}, offset {self.b}"
        return f"state {self.a & _random._UINT64:016x}"


_HASHED, _PHILOX = 0, 1


def state_of(generator: torch.Generator) -> GeneratorState:
    """The state of a generator; nothing of it changes. Does not communicate."""
    if generator.device.type != "cpu":
        return GeneratorState(_PHILOX, _random._int64(generator.initial_seed()), generator.get_offset())
    # Not the seed, of which a CPU generator keeps 64 bits and uses 32.
    digest = hashlib.blake2b(bytes(generator.get_state().numpy()[8:]), digest_size=16).digest()
    return GeneratorState(_HASHED, *(int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])))


def state_of_this_rank(generator: torch.Generator) -> GeneratorState:
    """:func:`state_of`, and of the first rank that LocalTensorMode plays under it."""
    mode = enabled_local_tensor_mode()
    if mode is None or not mode._per_rank_rng_states:
        return state_of(generator)
    with _disable_current_modes():
        first = min(mode.ranks)
        return _simulated_states(mode, torch.tensor([first]), generator)[first]


class RNGDesyncError(RuntimeError):
    """Ranks of a mesh whose generators are not in the same state, or that are at different random ops. Raised on every
    rank of the mesh.

    Attributes:
        states (dict[int, GeneratorState]): the state of each rank of the mesh, by global rank.
    """

    def __init__(self, message: str, states: dict[int, GeneratorState]):
        super().__init__(message)
        self.states = states

    def __reduce__(self) -> Any:
        return RNGDesyncError, (str(self), self.states)


class Call(NamedTuple):
    """What a rank is about to do or has done, for the checks of the debug mode: ranks have to be at the same call."""

    text: str
    lead: str
    trail: Callable[[], str]


_NO_CALL = Call("", "", lambda: "")
_CALL_BYTES = 256


def check_rng_sync(device_mesh: DeviceMesh, generator: torch.Generator | None = None) -> None:
    """Checks that a generator is in the same state on every rank of ``device_mesh``.

    Communicates: every rank of the mesh has to call it. One all-reduce of 16 bytes over each dim of the mesh, on
    the mesh's own groups; after a difference, one all-gather more over each. A rank outside the mesh does nothing.

    Args:
        device_mesh (:class:`DeviceMesh`): the mesh whose ranks have to be in step. Where stages are seeded apart on
            purpose, pass a stage's own sub-mesh.
        generator (:class:`torch.Generator`): the generator to look at; of any device. Default: the default generator of
            the mesh's device.

    Raises:
        RNGDesyncError: on every rank of the mesh, if it is not.
        TypeError: ``device_mesh`` is no mesh, or ``generator`` no generator.
        RuntimeError: a rank did not arrive within the timeout of its group.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"check_rng_sync expects device_mesh to be a DeviceMesh, found {type(device_mesh).__name__}")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"check_rng_sync expects generator to be a torch.Generator, found {type(generator).__name__}")
    check(device_mesh, generator, torch.device(device_mesh.device_type), _NO_CALL)


def check(mesh: DeviceMesh, generator: torch.Generator | None, device: torch.device, call: Call) -> None:
    """:func:`check_rng_sync` at ``call``, for the default generator of ``device`` unless one is passed."""
    name = (
        f"the generator that was passed, on {generator.device},"
        if generator
        else f"the default {device.type} generator"
    )
    if generator is None:
        generator = _random._default_generator(device)
    with _disable_current_modes():
        mode = enabled_local_tensor_mode()
        if mode is not None and mode._per_rank_rng_states:
            # A slice of a mesh is one for each line of ranks that it goes through.
            for table in mesh._layout.remap_to_tensor(mesh._rank_map):
                states = _simulated_states(mode, table, generator)
                if len(set(states.values())) > 1:
                    raise _error(name, mesh, table, states, {}, call)
            return
        if not mesh._is_current_rank_part_of_mesh():
            return
        state = state_of(generator)
        try:
            if _all_equal(mesh, f"{tuple(state)} {call.text}"):
                return
            text = _shortened(call.text.encode()).ljust(_CALL_BYTES, b"\0")
            words = [int.from_bytes(text[i : i + 8], "little", signed=True) for i in range(0, _CALL_BYTES, 8)]
            rows = _gather(mesh, [dist.get_rank(), *state, *words])
        except RuntimeError as error:
            raise RuntimeError(
                f"{call.lead or 'check_rng_sync: '}rank {dist.get_rank()} waited for the other ranks of {_mesh_text(mesh)} "
                f"to check that {name} is in step, and it failed: {error}"
            ) from error
    states, calls = {}, {}
    for rank, kind, a, b, *words in sorted(rows):
        states[rank] = GeneratorState(kind, a, b)
        calls[rank] = (
            b"".join(word.to_bytes(8, "little", signed=True) for word in words).rstrip(b"\0").decode(errors="ignore")
        )
    raise _error(name, mesh, mesh.mesh, states, calls, call)


def _tensor(mesh: DeviceMesh, words: Sequence[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64, device=mesh.device_type)


def _shortened(text: bytes) -> bytes:
    """``text`` in as many bytes as are sent; where they are too few, told apart from other texts by its hash."""
    if len(text) <= _CALL_BYTES:
        return text
    mark = f"... ({hashlib.blake2b(text, digest_size=8).hexdigest()})".encode()
    return text[: _CALL_BYTES - len(mark)] + mark


def _all_equal(mesh: DeviceMesh, text: str) -> bool:
    """Whether every rank of the mesh has this text: one all-reduce of 16 bytes a mesh dim."""
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    largest = _tensor(mesh, [word, ~word])  # the largest ~word is that of the least word
    for mesh_dim in range(mesh.ndim):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(mesh_dim))
    most, least = largest.tolist()
    return most == ~least


def _gather(mesh: DeviceMesh, words: Sequence[int]) -> list[list[int]]:
    """The integers of every rank of the mesh."""
    rows = _tensor(mesh, words).unsqueeze(0)
    for mesh_dim in range(mesh.ndim):
        if mesh.size(mesh_dim) > 1:
            parts = [torch.empty_like(rows) for _ in range(mesh.size(mesh_dim))]
            dist.all_gather(parts, rows, group=mesh.get_group(mesh_dim))
            rows = torch.cat(parts)
    return rows.tolist()


def _simulated_states(mode: Any, table: torch.Tensor, generator: torch.Generator) -> dict[int, GeneratorState]:
    """The states that LocalTensorMode keeps for the ranks of ``table`` that it plays; a generator that was passed is one
    for all."""
    from torch.distributed import _local_tensor

    ours = _local_tensor._get_rng_state()
    states = {}
    try:
        for rank in sorted(mode.ranks.intersection(table.flatten().tolist())):
            _local_tensor._set_rng_state(*mode._per_rank_rng_states[rank])
            states[rank] = state_of(generator)
    finally:
        _local_tensor._set_rng_state(*ours)
    return states


# ---------------------------------------------------------------------------------------------------------------------
# The error's text.
# ---------------------------------------------------------------------------------------------------------------------


def _error(
    name: str,
    mesh: DeviceMesh,
    table: torch.Tensor,
    states: dict[int, GeneratorState],
    calls: dict[int, str],
    call: Call,
) -> RNGDesyncError:
    lines = []
    told_apart: dict[int, Any] = dict(states)
    if len(set(calls.values())) > 1:
        told_apart = dict(calls)
        lines.append(f"{call.lead}ranks of {_mesh_text(mesh, table)} are at different random ops.")
        lines += ["", *_table("at", calls)]
    else:
        lines.append(f"{call.lead}{name} is not in the same state on all ranks of {_mesh_text(mesh, table)}.")
    lines += ["", *_table("generator", states), ""]
    lines += _odd_ones(told_apart, table, _dim_names(mesh))
    lines.append(
        "Seed all ranks of the mesh alike (torch.manual_seed, torch_dtensor_rng.manual_seed), and run the same random ops "
        "on all of them, in the same order. torch_dtensor_rng.RNGSyncDebugMode() finds the first op at which they differ; "
        "docs/debugging.md has the usual causes."
    )
    if trail := call.trail():
        lines += ["", trail]
    message = "\n".join(lines)
    return RNGDesyncError(message[0].upper() + message[1:], states)


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"dim {i}" for i in range(mesh.ndim)))


def _mesh_text(mesh: DeviceMesh, table: torch.Tensor | None = None) -> str:
    """A mesh as text; ``table`` is its ranks, by default as on this rank."""
    table = mesh.mesh if table is None else table
    dims = ", ".join(f"{name} {size}" for name, size in zip(_dim_names(mesh), mesh.shape))
    return f"the {mesh.device_type} mesh ({dims}) of ranks {ranges(table.flatten().tolist())}"


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as text, runs as ranges: ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _holders(values: dict[int, Any]) -> list[tuple[Any, list[int]]]:
    """(value, ranks), the value that most ranks hold first."""
    holders: dict[Any, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return sorted(holders.items(), key=lambda one: (-len(one[1]), one[1]))


_ROWS = 16


def _table(head: str, values: dict[int, Any]) -> list[str]:
    rows = [(head, "ranks"), *((str(value), ranges(ranks)) for value, ranks in _holders(values))]
    left_out = len(rows) - 1 - _ROWS
    width = max(len(row[0]) for row in rows)
    lines = [f"  {left:<{width}}  {right}".rstrip() for left, right in rows[: _ROWS + 1]]
    return [*lines, f"  ... and {left_out} more"] if left_out > 0 else lines


def _odd_ones(values: dict[int, Any], table: torch.Tensor, names: Sequence[str]) -> list[str]:
    """Which ranks differ from most, and along which dims of the mesh, whose ranks are ``table``."""
    at = {int(table[index]): index for index in itertools.product(*map(range, table.shape))}
    dims = [dim for dim, size in enumerate(table.shape) if size > 1]
    differ = [
        dim
        for dim in dims
        if any(
            # LocalTensorMode may play some of the ranks only.
            len({values[int(rank)] for rank in line if int(rank) in values}) > 1
            for line in table.movedim(dim, -1).reshape(-1, table.shape[dim])
        )
    ]
    agree = [dim for dim in dims if dim not in differ]
    lines = []
    (_, most), (_, second), *_ = _holders(values)
    if len(most) > len(second):
        odd = sorted(rank for rank in values if rank not in most)
        first = at[odd[0]]
        slices = [
            f"{names[dim]} {first[dim]}"
            for dim in dims
            if sorted(table.select(dim, first[dim]).flatten().tolist()) == odd
        ]
        where = slices or [", ".join(f"{names[dim]} {at[rank][dim]}" for dim in dims) for rank in odd[:4]]
        more = "" if slices or len(odd) <= 4 else "; ..."
        who = f"ones out: ranks {ranges(odd)}" if len(odd) > 1 else f"one out: rank {odd[0]}"
        lines.append(f"The odd {who}, at {'; '.join(where)}{more}.")
    along = f"They differ along {' and '.join(names[dim] for dim in differ)}"
    lines.append(along + (f", and agree along {' and '.join(names[dim] for dim in agree)}." if agree else "."))
    return lines
