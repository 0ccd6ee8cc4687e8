"""Putting the package into torch, and taking it out again. The only file that patches."""

import os
import threading
from types import TracebackType
from typing import Any

import torch
import torch.distributed.tensor as dtensor
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._dispatch as torch_dispatch
import torch.distributed.tensor._random as torch_random
from torch._functorch import compile_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _composed, _debug, _dispatch, _factories, _orthogonal, _random, _torch_names, _traced, _trunc_normal

POLICIES = ("offset", "single_device")
DEBUG_VARIABLE = "TORCH_DTENSOR_RNG_DEBUG"
_DEBUG_HISTORY = 8
_OFF = ("", "0", "false", "no", "off")
_MISSING = object()
_lock = threading.RLock()


class _Patches:
    """What is set in torch, and how to set it back. Patches nest: the last ones are taken out first."""

    _what: str
    _left = False

    def __init__(self) -> None:
        self._undo: list[tuple[Any, Any, Any]] = []

    def _put_in(self) -> None:
        raise NotImplementedError

    def _set(self, owner: Any, name: Any, value: Any) -> None:
        if isinstance(owner, dict):
            self._undo.append((owner, name, owner.get(name, _MISSING)))
            owner[name] = value
        else:
            self._undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def _take_out(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if not isinstance(owner, dict):
                setattr(owner, name, value)
            elif value is _MISSING:
                owner.pop(name, None)
            else:
                owner[name] = value

    def _push(self) -> None:
        with _lock:
            try:
                self._put_in()
            except BaseException:
                self._take_out()
                raise
            _patches.append(self)

    def _pop(self) -> None:
        with _lock:
            if self not in _patches:
                return
            if _patches[-1] is not self:
                raise RuntimeError(
                    f"installations are taken out in reverse order, and {_patches[-1]._what} is still in"
                )
            _patches.pop()
            self._take_out()
            if _patches and _patches[-1]._left:
                _patches[-1]._pop()


class Installation(_Patches):
    """A handle of :func:`install`: ``uninstall()``, or leaving its ``with`` block, takes it out of torch again.

    Attributes:
        policy (str): how a shard's place is chosen.
        strict (bool): whether an op that cannot draw the numbers of one device raises.
    """

    _what = "a later one"

    def __init__(self, policy: str, strict: bool):
        super().__init__()
        self.policy = policy
        self.strict = strict

    def _put_in(self) -> None:
        _torch_names.check(_torch_names.DYNAMO_NAMES)
        from . import _dynamo  # not before it is needed, as it takes a second

        rows = _dispatch.Policy(self.policy == "single_device", self.strict).handlers()
        watches = [one._watch for one in _patches if isinstance(one, RNGSyncDebugMode)]
        if os.environ.get(DEBUG_VARIABLE, "").lower() not in _OFF:
            watches.append(_debug.Watch(None, _DEBUG_HISTORY))
        for watch in watches:
            rows = {op: watch.wrap(handler) for op, handler in rows.items()}
            self._set(_traced, "watcher", watch.in_graph)
            self._set(_factories, "around", watch.wrap)
        for op, handler in (rows | _composed.HANDLERS).items():
            self._set(DTensor._op_dispatcher._custom_op_handlers, op, handler)
        self._set(torch_random, "OffsetBasedRNGTracker", _random.OffsetBasedRNGTracker)
        tracker = _AnyDeviceTracker()
        for module in (torch_random, _random):
            self._set(module, "_rng_tracker", tracker)
        self._set(torch_random, "is_rng_supported_mesh", _random.is_rng_supported_mesh)
        self._set(torch_random, "manual_seed", _random.manual_seed)
        self._set(torch_dispatch, "is_rng_supported_mesh", _random.is_rng_supported_mesh)
        for module in (dtensor, torch_api):
            self._set(module, "rand", _factories.rand)
            self._set(module, "randn", _factories.randn)
        # Graphs that were compiled without this installation must not be served under it, nor the other way round.
        tag = f"{torch.compiler.config.cache_key_tag}torch_dtensor_rng:{self.policy}:{_traced.GRAPH_FORMAT};"
        self._set(torch.compiler.config, "cache_key_tag", tag)
        self._set(compile_utils, "rand_ops", [*compile_utils.rand_ops, *_traced.RANDOM_PACKETS])
        for variable, call in _dynamo.CALLS:
            self._set(variable, call, _dynamo.wrap(getattr(variable, call)))
        init = torch.nn.init
        self._set(init, "_no_grad_trunc_normal_", _trunc_normal.wrap(init._no_grad_trunc_normal_))
        self._set(init, "orthogonal_", _orthogonal.wrap(init.orthogonal_))
        _after_change()

    def _take_out(self) -> None:
        super()._take_out()
        _after_change()

    def uninstall(self) -> None:
        """Takes this installation out; does nothing when it is out already.

        Raises:
            RuntimeError: a later installation or an :class:`RNGSyncDebugMode` is still in.
        """
        self._pop()

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


class RNGSyncDebugMode(_Patches):
    """A context manager that checks, before and after each random op on a DTensor, that the ranks of the op's mesh are in
    step, and at the same op; see :func:`check_rng_sync`. The package has to be installed.

    Communicates: at least two small all-reduces over each mesh dim for each op, on the mesh's own groups, so it has to be on
    on all ranks of the mesh alike. While it is off, nothing is added to any op. Ops in a compiled graph are not checked,
    which a warning says once.

    Args:
        device_mesh (:class:`DeviceMesh`): check only the ops on this mesh. Default: every op, on its own mesh.

    Keyword args:
        history (int): how many of the last draws to remember; the error of a rank shows its own. Default: 0.

    Raises:
        RNGDesyncError: inside, from the op before or in which the ranks have drifted apart, on every rank of its mesh.
        RuntimeError: on entering it, if the package is not installed.
        ValueError: ``history`` is negative.

    Example::

        >>> with torch_dtensor_rng.RNGSyncDebugMode(history=8):
        ...     model(batch).sum().backward()
    """

    _what = "RNGSyncDebugMode"

    def __init__(self, device_mesh: DeviceMesh | None = None, *, history: int = 0):
        super().__init__()
        if not isinstance(device_mesh, DeviceMesh | None):
            raise TypeError(f"RNGSyncDebugMode expects device_mesh to be a DeviceMesh, found {device_mesh!r}")
        if not isinstance(history, int):
            raise TypeError(f"RNGSyncDebugMode expects history to be an int, found {history!r}")
        if history < 0:
            raise ValueError(f"RNGSyncDebugMode expects history to be 0 or more, found {history}")
        self._watch = _debug.Watch(device_mesh, history)

    def _put_in(self) -> None:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        for op in _dispatch.HANDLERS:
            self._set(handlers, op, self._watch.wrap(handlers[op]))
        self._set(_traced, "watcher", self._watch.in_graph)
        self._set(_factories, "around", self._watch.wrap)

    def __enter__(self) -> "RNGSyncDebugMode":
        if not _patches:
            raise RuntimeError("RNGSyncDebugMode watches the ops of torch_dtensor_rng, which is not installed")
        if self in _patches:
            raise RuntimeError("this RNGSyncDebugMode is on already; make another one")
        self._push()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left = True
        if _patches[-1] is self or kind is None:
            self._pop()
        # Else an error is on its way, past an installation that is still in: this goes when that is taken out.


_patches: list[_Patches] = []


def _after_change() -> None:
    _dispatch.forget()
    torch.compiler.reset()
    _traced.forget()


class _AnyDeviceTracker(_random.OffsetBasedRNGTracker):
    """The tracker of an installation, which is made before there is any mesh and serves meshes of every device."""

    def __init__(self) -> None:
        self._use_distribute_region = True

    @property
    def _device(self) -> torch.device:  # type: ignore[override]
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def install(policy: str = "offset", strict: bool = False) -> Installation:
    """Makes torch's DTensor draw from, and advance, the live generator. Does not communicate; call it on every rank,
    before or after the process group and any DTensor is made.

    Installations nest: each is taken out on its own, the last one first. With ``TORCH_DTENSOR_RNG_DEBUG=1`` in the
    environment every random op is checked as under :class:`RNGSyncDebugMode`.

    Args:
        policy (str): how a shard's place in the stream is chosen. ``"offset"``: each shard has its own range of Philox
            offsets on CUDA, and its own key on the CPU. ``"single_device"``: a shard gets the numbers that the plain call
            gives to its elements on one device, and the generator ends where that call leaves it.
        strict (bool): under ``"single_device"``, whether an op that cannot be so raises. Else it draws as under
            ``"offset"``, and warns once. Default: ``False``.

    Returns:
        Installation: a handle; ``with install(...):`` takes it out on exit.

    Raises:
        ValueError: ``policy`` is unknown, or ``strict`` is set for another one than ``"single_device"``.
    """
    if policy not in POLICIES:
        raise ValueError(f"install expects policy to be one of {', '.join(map(repr, POLICIES))}, found {policy!r}")
    if strict and policy != "single_device":
        raise ValueError(f"install expects strict=True only with policy='single_device', found policy={policy!r}")
    installation = Installation(policy, strict)
    installation._push()
    return installation


def uninstall() -> None:
    """Takes the last installation out, and leaves torch as it was before it.

    Raises:
        RuntimeError: nothing is installed.
    """
    with _lock:
        if not _patches:
            raise RuntimeError("torch_dtensor_rng is not installed")
        if not isinstance(last := _patches[-1], Installation):
            raise RuntimeError(f"torch_dtensor_rng cannot be taken out while {last._what} is still in")
        last.uninstall()
