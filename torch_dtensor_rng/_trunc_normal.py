"""``torch.nn.init.trunc_normal_`` on a DTensor: every rank draws the same number of rounds.

From torch 2.12 on it draws again until no value is out of bounds, and asks ``mask.any()`` for that. On torch 2.12 to
2.14 the truth of that DTensor is what the rank's own shard says, so that ranks stop after different numbers of rounds,
and every generator is out of step from there on.
"""

from typing import Any

import torch
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


def _any_on_any_rank(mask: DTensor) -> bool:
    """Whether any element of the whole tensor is true: one all-reduce of one number over each mesh dim that shards."""
    local = mask.to_local().any()
    mesh = mask.device_mesh
    if not mesh._is_current_rank_part_of_mesh():
        return False
    # The mesh's groups reduce tensors of the mesh's device; the shards may be offloaded to another one.
    flag = local.to(device=mesh.device_type, dtype=torch.int32)
    for mesh_dim, placement in enumerate(mask.placements):
        if not placement.is_replicate():
            flag = all_reduce(flag, "max", (mesh, mesh_dim))
    return bool(flag)


class _WholeTensorAny(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.any and isinstance(args[0], DTensor):
            return _any_on_any_rank(args[0])
        return func(*args, **(kwargs or {}))


def wrap(no_grad_trunc_normal_: Any) -> Any:
    """``torch.nn.init._no_grad_trunc_normal_``, asking its DTensors for the whole tensor's truth."""

    def on_dtensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _WholeTensorAny():
            return no_grad_trunc_normal_(tensor, *args, **kwargs)

    # A loop whose end depends on the data is no graph, and the mode above is not to be traced either.
    untraced = torch._disable_dynamo(on_dtensor)

    def _no_grad_trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return no_grad_trunc_normal_(tensor, *args, **kwargs)
        if torch.compiler.is_compiling():
            return untraced(tensor, *args, **kwargs)
        return on_dtensor(tensor, *args, **kwargs)

    return _no_grad_trunc_normal_
