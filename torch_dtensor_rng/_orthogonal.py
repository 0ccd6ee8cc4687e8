"""``torch.nn.init.orthogonal_`` on a DTensor: every rank makes the whole matrix, and keeps its part.

Torch's own raises for a wide matrix, as DTensor cannot transpose in place, and for some placements of more than two
dims. Its QR decomposition needs all of the matrix on every rank anyway; to draw it there needs no communication.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from . import _dispatch


def wrap(orthogonal_: Any) -> Any:
    """``torch.nn.init.orthogonal_``, drawing DTensors as the plain call does."""

    @functools.wraps(orthogonal_)
    def on_any(tensor: torch.Tensor, gain: float = 1, generator: torch.Generator | None = None) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or tensor.is_meta or not _dispatch._regions_enabled():
            return orthogonal_(tensor, gain, generator)
        _dispatch.check_in_place("orthogonal_", tensor)
        mesh = tensor.device_mesh
        if not mesh._is_current_rank_part_of_mesh():
            return tensor
        # On the local tensor's device, which need not be the mesh's.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
        orthogonal_(whole, gain, generator)
        with torch.no_grad():
            tensor.copy_(distribute_tensor(whole, mesh, tensor.placements, src_data_rank=None))
        return tensor

    return on_any
