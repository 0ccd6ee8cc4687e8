"""Putting the package into torch, and taking it out again. The only file that patches."""

import sys
import threading
from types import TracebackType
from typing import Any

import torch
import torch.distributed.tensor as dtensor
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._dispatch as torch_dispatch
import torch.distributed.tensor._random as torch_random
from torch.distributed.tensor import DTensor

from . import _composed, _dispatch, _factories, _random, _traced, _trunc_normal

POLICIES = ("offset",)
_MISSING = object()
_lock = threading.RLock()


class Installation:
    """A handle of :func:`install`: ``uninstall()``, or leaving its ``with`` block, takes it out of torch again.

    Attributes:
        policy (str): how a shard's place is chosen.
    """

    def __init__(self, policy: str):
        self.policy = policy
        self._undo: list[tuple[Any, Any, Any]] = []

    def _set(self, owner: Any, name: Any, value: Any) -> None:
        if isinstance(owner, dict):
            self._undo.append((owner, name, owner.get(name, _MISSING)))
            owner[name] = value
        else:
            self._undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def _put_in(self) -> None:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        for op, handler in (_dispatch.HANDLERS | _composed.HANDLERS).items():
            self._set(handlers, op, handler)
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
        init = torch.nn.init
        self._set(init, "_no_grad_trunc_normal_", _trunc_normal.wrap(init._no_grad_trunc_normal_))

    def _take_out(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if not isinstance(owner, dict):
                setattr(owner, name, value)
            elif value is _MISSING:
                owner.pop(name, None)
            else:
                owner[name] = value
        _after_change()

    def uninstall(self) -> None:
        """Takes this installation out; does nothing when it is out already.

        Raises:
            RuntimeError: a later installation is still in.
        """
        with _lock:
            if self not in _installations:
                return
            if _installations[-1] is not self:
                raise RuntimeError("installations are taken out in reverse order, and a later one is still in")
            _installations.pop()
            self._take_out()

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


_installations: list[Installation] = []


def _after_change() -> None:
    _dispatch.forget()
    if "torch._dynamo" in sys.modules:  # nothing is compiled otherwise, and its import takes seconds
        torch.compiler.reset()


class _AnyDeviceTracker(_random.OffsetBasedRNGTracker):
    """The tracker of an installation, which is made before there is any mesh and serves meshes of every device."""

    def __init__(self) -> None:
        self._use_distribute_region = True

    @property
    def _device(self) -> torch.device:  # type: ignore[override]
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def install(policy: str = "offset") -> Installation:
    """Makes torch's DTensor draw from, and advance, the live generator. Does not communicate; call it on every rank,
    before or after the process group and any DTensor is made.

    Installations nest: each is taken out on its own, the last one first.

    Args:
        policy (str): how a shard's place in the stream is chosen. ``"offset"``: each shard has its own range of Philox
            offsets on CUDA, and its own key on the CPU.

    Returns:
        Installation: a handle; ``with install(...):`` takes it out on exit.

    Raises:
        ValueError: ``policy`` is unknown.
    """
    if policy not in POLICIES:
        raise ValueError(f"install expects policy to be one of {', '.join(map(repr, POLICIES))}, found {policy!r}")
    with _lock:
        installation = Installation(policy)
        try:
            installation._put_in()
        except BaseException:
            installation._take_out()
            raise
        _installations.append(installation)
        _after_change()
    return installation


def uninstall() -> None:
    """Takes the last installation out, and leaves torch as it was before it.

    Raises:
        RuntimeError: nothing is installed.
    """
    with _lock:
        if not _installations:
            raise RuntimeError("torch_dtensor_rng is not installed")
        _installations[-1].uninstall()
