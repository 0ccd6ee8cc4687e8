"""Seeding: the same seed on every rank, or another one along named mesh dims."""

import operator
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._checkpoint import distinct_index


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
    seed = seed + distinct_index("manual_seed", device_mesh, distinct_dims)
    if isinstance(seed, int):  # a simulated rank's index is symbolic, and has no modulo
        seed %= 1 << 64
    torch.manual_seed(seed)
