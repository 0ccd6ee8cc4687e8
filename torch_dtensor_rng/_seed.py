"""Seeding: the same seed on every rank, or another one along named mesh dims."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None, *, distinct_dims: Sequence[str] = ()) -> None:
    """Seeds the calling rank's default generators on all devices, as :func:`torch.manual_seed`. Does not communicate.

    Every rank that passes the same ``seed`` gets the same state, except along ``distinct_dims``: there the seed is
    ``seed`` plus the row-major index of the rank's coordinates on these dims, modulo 2**64. Pipeline stages that should
    draw different numbers, for example, are ``distinct_dims=("pp",)``.

    Args:
        seed (int): in [0, 2**64). A CPU generator keeps the lower 32 bits, as under :func:`torch.manual_seed`.
        device_mesh (:class:`DeviceMesh`): a mesh that the calling rank is part of; needed with ``distinct_dims``.

    Keyword args:
        distinct_dims (Sequence[str]): names of dims of ``device_mesh``.

    Raises:
        TypeError: ``seed`` is no integer.
        ValueError: ``seed`` is out of range, or a name is not among the dims of ``device_mesh``.
        RuntimeError: the calling rank is not part of ``device_mesh``.
    """
    seed = operator.index(seed)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"manual_seed expects seed in [0, 2**64), found {seed}")
    if isinstance(distinct_dims, str):
        distinct_dims = (distinct_dims,)
    names = (device_mesh.mesh_dim_names or ()) if device_mesh is not None else ()
    for name in distinct_dims:
        if name not in names:
            found = "no device_mesh" if device_mesh is None else f"a device_mesh with dims {tuple(names)}"
            raise ValueError(
                f"manual_seed expects distinct_dims among the dims of device_mesh, found {name!r} and {found}"
            )
    if device_mesh is not None:
        coordinate: Sequence[Any] | None = device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError("manual_seed requires the current rank to be a part of the device mesh")
        index: Any = 0
        for dim in (names.index(name) for name in distinct_dims):
            index = index * device_mesh.size(dim) + coordinate[dim]
        seed = seed + index
        if isinstance(seed, int):  # a simulated rank's index is symbolic, and has no modulo
            seed %= 1 << 64
    torch.manual_seed(seed)
