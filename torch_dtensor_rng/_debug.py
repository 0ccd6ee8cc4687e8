"""What RNGSyncDebugMode puts around the handler of a random op: a check before it and one after it, and a trail."""

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _random, _sync
from ._capture import capturing

_SKIPPED = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__))


class _Draw(NamedTuple):
    text: str
    before: _sync.GeneratorState
    after: _sync.GeneratorState
    caller: str


class Watch:
    """The checks around random ops, and the last draws of this rank.

    Args:
        device_mesh: check only ops on this mesh. Default: every op, on its own mesh.
        history: how many draws to remember.
    """

    def __init__(self, device_mesh: DeviceMesh | None, history: int):
        self.device_mesh = device_mesh
        self.history: deque[_Draw] = deque(maxlen=history)
        self._told = False

    def wrap(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """``handler`` with the checks around it."""

        def watched(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = next((one for one in args if isinstance(one, DTensor)), None)
            if x is None or not self._watches(x, kwargs):
                return handler(op, args, kwargs)
            if x._local_tensor.is_cuda and capturing(x._local_tensor.device):
                self.in_graph()
                return handler(op, args, kwargs)
            return self._watched(handler, op, x, args, kwargs)

        # Where an op breaks a graph, Dynamo would trace this, and the check find itself in a trace.
        untraced = torch._disable_dynamo(watched)
        return lambda *args: untraced(*args) if "torch._dynamo" in sys.modules else watched(*args)

    def in_graph(self) -> None:
        """Says once that a compiled or captured graph has drawn unseen."""
        if not self._told:
            self._told = True
            warnings.warn(
                "RNGSyncDebugMode does not look inside compiled or captured graphs: the random ops in them are not "
                "checked. Run the model in eager mode, or call torch_dtensor_rng.check_rng_sync between the graphs.",
                stacklevel=2,
            )

    def _watches(self, x: DTensor, kwargs: dict[str, Any]) -> bool:
        mesh = x._spec.mesh
        return (
            (self.device_mesh is None or mesh == self.device_mesh)
            and mesh._is_current_rank_part_of_mesh()
            and torch.device(kwargs.get("device") or x._local_tensor.device).type != "meta"
            and not _are_we_tracing()
        )

    def _watched(
        self, handler: Callable[..., Any], op: Any, x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mesh = x._spec.mesh
        device = torch.device(kwargs.get("device") or x._local_tensor.device)
        passed = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)), None)
        generator = _random._default_generator(device) if passed is None else passed
        inputs = [one for one in args if isinstance(one, DTensor)]
        described = [
            f"shape {tuple(one.shape)} and placements [{', '.join(map(str, one.placements))}]" for one in inputs
        ]
        text = f"{op} on a DTensor of {', one of '.join(described)}{'' if passed is None else ', with generator='}"

        def check(moment: str, lead: str) -> None:
            _sync.check(mesh, passed, device, _sync.Call(f"{moment} {text}", lead, self.trail))

        check("before", f"Drifted before {text}: ")
        before = _sync.state_of_this_rank(generator)
        try:
            out = handler(op, args, kwargs)
        except Exception:
            # Where only some ranks raise, the others learn of it here, and do not wait.
            check("raised in", f"Raised in {text}: ")
            raise
        if self.history.maxlen:
            self.history.append(_Draw(text, before, _sync.state_of_this_rank(generator), _caller()))
        check("after", f"Drifted inside {text}: ")
        return out

    def trail(self) -> str:
        """The last draws of this rank, as text."""
        if not self.history:
            return ""
        lines = [f"The last draws of this rank, rank {torch.distributed.get_rank()}:"]
        lines += [f"  {one.caller}: {one.text}\n    {one.before} -> {one.after}" for one in self.history]
        return "\n".join(lines)


def _caller() -> str:
    """The file and line that drew: the innermost frame outside of torch and this package."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
