"""The states of generators in a distributed checkpoint: written once for all ranks that share them, loaded on any number
of ranks.

All generators of a rank are one object under one key, not a tensor each. DCP writes what several ranks hold under one key
from one of them, whatever it is, but it chooses that rank key by key: one object never mixes the states of two ranks. And
an object is not checked against the size of the one that is there, so that a state of another device type gets as far as
:meth:`RNGState.load_state_dict`, which can say so.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import _random


class RNGState:
    """The states of the default generators, and of ``generators``, for :mod:`torch.distributed.checkpoint`: a
    :class:`~torch.distributed.checkpoint.stateful.Stateful`.

    Holds the default CPU generator, the default generator of the mesh's device (without a mesh: of the current
    accelerator, if there is one), and ``generators``. As nothing else has a state, this is all that DTensor ops need to go
    on from a checkpoint. With ``install(policy="single_device")`` a run that is resumed on another number of ranks draws
    the numbers of the uninterrupted one.

    The states are written once for all ranks that share them, and may be loaded on any number of ranks. Ranks that were
    seeded apart on purpose (``manual_seed(seed, device_mesh, distinct_dims=("pp",))``) pass the same ``distinct_dims``
    here: then they are written once for each index along these dims, as ``index_0``, ``index_1`` and so on. A checkpoint
    can be loaded at fewer indices than it was saved at, and not at more.

    Nothing here communicates, so it is not found here if ranks at one index are out of step: one of them would be saved
    for all. Call :func:`check_rng_sync` before saving, on the mesh of one index (``device_mesh["dp"]``).

    Args:
        generators (dict[str, :class:`torch.Generator`]): more generators, of any device, by a name to find them by.
        device_mesh (:class:`DeviceMesh`): a mesh that the calling rank is part of; needed with ``distinct_dims``.
        distinct_dims (Sequence[str]): names of the dims of ``device_mesh`` along which ranks are seeded apart.

    Raises:
        ValueError: a name is not among the dims of ``device_mesh``.
        RuntimeError: the calling rank is not part of ``device_mesh``.

    Example::

        >>> rng = RNGState({"data": data_generator}, mesh, distinct_dims=("pp",))
        >>> app = {"model": model, "optimizer": optimizer, "rng": rng}
        >>> torch.distributed.checkpoint.save(app, checkpoint_id="step_100")
        >>> torch.distributed.checkpoint.load(app, checkpoint_id="step_100")  # the generators are where they were
    """

    def __init__(
        self,
        generators: Mapping[str, torch.Generator] | None = None,
        device_mesh: DeviceMesh | None = None,
        distinct_dims: Sequence[str] = (),
    ) -> None:
        self._index = distinct_index("RNGState", device_mesh, distinct_dims)
        self._generators = dict(generators or {})
        if device_mesh is not None:
            device_type = device_mesh.device_type
        else:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device_type = "cpu" if accelerator is None else accelerator.type
        self._device_types = tuple(dict.fromkeys(("cpu", device_type)))

    def state_dict(self) -> dict[str, Any]:
        """The states as they are now, of the calling rank's index. Does not communicate.

        Returns:
            dict[str, Any]: one key, ``index_<i>``, and under it a tuple of plain Python values.
        """
        return {_key(self._index): tuple(tuple(_save(name, generator)) for name, generator in self._live())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts every generator into its state in ``state_dict``, or changes none of them. Does not communicate.

        Args:
            state_dict (dict[str, Any]): what :meth:`state_dict` returned, at any rank of the same index.

        Raises:
            RuntimeError: the index is not there, other generators are there, or a state is of another device type, torn
                or not valid: on the ranks that find it so. :func:`torch.distributed.checkpoint.load` itself raises ``Missing key ... index_<i>`` on all
                ranks where an index was not saved.
        """
        live = {_label(name, generator.device.type): generator for name, generator in self._live()}
        key = _key(self._index)
        if key not in state_dict:
            raise RuntimeError(
                f"RNGState found no {key} in the state dict, which holds: {_listed(state_dict)}. Wanted: {_listed(live)}. "
                "A checkpoint can be loaded at no more indices along distinct_dims than it was saved at."
            )
        saved = {_label(one.name, one.device_type): one for one in _entries(key, state_dict[key])}
        if saved.keys() != live.keys():
            raise RuntimeError(
                f"RNGState holds: {_listed(live)}; and {key} of the checkpoint: {_listed(saved)}. Pass the generators that "
                "were saved, under the names they had, and a device_mesh of the same device type."
            )
        states = [(live[label], _checked(f"{label} in {key}", live[label].device.type, saved[label])) for label in live]
        _set_all(states)

    def _live(self) -> list[tuple[str | None, torch.Generator]]:
        # Looked up anew, as the current device may change.
        defaults = [(None, _random._default_generator(torch.device(one))) for one in self._device_types]
        return [*defaults, *self._generators.items()]


def distinct_index(caller: str, device_mesh: DeviceMesh | None, distinct_dims: Sequence[str]) -> Any:
    """The row-major index of the calling rank's coordinates on the mesh dims named ``distinct_dims``; 0 for none. Errors
    speak for ``caller``."""
    if isinstance(distinct_dims, str):
        distinct_dims = (distinct_dims,)
    names = (device_mesh.mesh_dim_names or ()) if device_mesh is not None else ()
    for name in distinct_dims:
        if name not in names:
            found = "no device_mesh" if device_mesh is None else f"a device_mesh with dims {tuple(names)}"
            raise ValueError(
                f"{caller} expects distinct_dims among the dims of device_mesh, found {name!r} and {found}"
            )
    index: Any = 0
    if device_mesh is not None:
        coordinate: Sequence[Any] | None = device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"{caller} requires the current rank to be a part of the device mesh")
        for dim in (names.index(name) for name in distinct_dims):
            index = index * device_mesh.size(dim) + coordinate[dim]
    return index


# ---------------------------------------------------------------------------------------------------------------------
# What is in the checkpoint.
# ---------------------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A generator in a checkpoint, where it is a plain tuple. ``name`` is None for the default one of its device type."""

    name: str | None
    device_type: str
    state: bytes
    digest: bytes


def _key(index: int) -> str:
    return f"index_{index}"


def _label(name: str | None, device_type: str) -> str:
    return f"the default {device_type} generator" if name is None else f"generators[{name!r}]"


def _listed(labels: Mapping[str, Any]) -> str:
    return ", ".join(labels) or "nothing"


def _digest(state: bytes) -> bytes:
    # torch.load does not look at the checksums of the files it reads.
    return hashlib.blake2b(state, digest_size=16).digest()


def _save(name: str | None, generator: torch.Generator) -> _Entry:
    state = bytes(generator.get_state().numpy())
    return _Entry(name, generator.device.type, state, _digest(state))


def _entries(key: str, value: Any) -> list[_Entry]:
    try:
        entries = [_Entry(*one) for one in value]
    except TypeError:
        entries = []
    if not entries or not all(isinstance(one.state, bytes) for one in entries):
        raise RuntimeError(f"RNGState expects {key} to be what RNGState.state_dict() put there, found something else.")
    return entries


def _checked(where: str, device_type: str, entry: _Entry) -> torch.Tensor:
    """The state of an entry for a generator on ``device_type``."""
    if entry.device_type != device_type:
        raise RuntimeError(
            f"RNGState cannot load the state of {where} into a {device_type} generator: it is that of a "
            f"{entry.device_type} generator. Pass a {entry.device_type} generator under this name."
        )
    state = torch.tensor(list(entry.state), dtype=torch.uint8, device="cpu")
    wrong = (
        "it is torn, not what was saved" if _digest(entry.state) != entry.digest else _what_is_wrong(device_type, state)
    )
    if wrong:
        raise RuntimeError(f"RNGState cannot load the state of {where}: {wrong}. Load another checkpoint.")
    return state


def _what_is_wrong(device_type: str, state: torch.Tensor) -> str:
    """Why ``state`` cannot be the state of a generator on ``device_type``; empty if it can be."""
    if device_type == "cpu":
        try:
            torch.Generator().set_state(state)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    elif state.numel() != 16:
        return f"a Philox state has 16 bytes, found {state.numel()}"
    elif (offset := int(_random._PhiloxState(state).offset)) < 0 or offset % 4:
        return f"a Philox offset is a multiple of 4 and not below 0, found {offset}"
    return ""


def _set_all(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Sets every generator, or none if one of them refuses (on CUDA it does while a graph is captured)."""
    with contextlib.ExitStack() as undo:
        for generator, state in states:
            before = generator.get_state()
            generator.set_state(state)
            undo.callback(generator.set_state, before)
        undo.pop_all()
