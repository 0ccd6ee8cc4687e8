"""Factories of random DTensors, with ``generator=``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ._dispatch import HANDLERS

aten = torch.ops.aten
_empty: Callable[..., DTensor] = dtensor.empty


def _fill(
    op: Any, args: tuple[Any, ...], size: Any, generator: torch.Generator | None, requires_grad: bool, **kwargs: Any
) -> DTensor:
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"argument 'generator' must be a torch.Generator, not {type(generator).__name__}")
    with torch.no_grad():
        x = _empty(*size, requires_grad=requires_grad, **kwargs)
        HANDLERS[op](op, (x, *args), {} if generator is None else {"generator": generator})
    return x


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A :class:`DTensor` of random numbers from the uniform distribution on ``[0, 1)``. Does not communicate.

    Args:
        size (int...): the global shape, as integers or as one list, tuple or :class:`torch.Size`.

    Keyword args:
        requires_grad (bool): whether autograd records operations on the result. Default: ``False``.
        dtype (:class:`torch.dtype`): a floating-point dtype. Default: :func:`torch.get_default_dtype`.
        layout (:class:`torch.layout`): only ``torch.strided``.
        device_mesh (:class:`DeviceMesh`): Default: the mesh of the enclosing ``with`` block.
        placements (Sequence[:class:`Placement`]): ``Shard`` and ``Replicate``. Default: ``Replicate`` on every mesh
            dim.
        generator (:class:`torch.Generator`): the generator to read and advance, in the same state on every rank.
            Default: the device's default generator.

    Raises:
        RuntimeError: ``generator`` is of another device type than the mesh, or a placement is ``Partial``.
    """
    return _fill(
        aten.uniform_.default, (), size, generator, requires_grad,
        dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements,
    )  # fmt: skip


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A :class:`DTensor` of random numbers from the normal distribution with mean 0 and variance 1. Arguments and
    errors as in :func:`rand`. Does not communicate."""
    return _fill(
        aten.normal_.default, (), size, generator, requires_grad,
        dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements,
    )  # fmt: skip


def randint(
    low: int = 0,
    high: Any = None,
    size: Any = None,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """``randint(low=0, high, size, *, ...)``: a :class:`DTensor` of random integers, uniform on ``[low, high)``.
    Other arguments and errors as in :func:`rand`. Does not communicate.

    Args:
        low (int): the least integer to be drawn. Default: 0.
        high (int): one above the largest integer to be drawn.
        size (Sequence[int]): the global shape.

    Keyword args:
        dtype (:class:`torch.dtype`): Default: ``torch.int64``.
    """
    if size is None and isinstance(high, Sequence):
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    if not isinstance(size, Sequence):
        raise TypeError(f"randint(): argument 'size' must be a sequence of ints, not {type(size).__name__}")
    return _fill(
        getattr(aten.random_, "from"), (low, high), (size,), generator, requires_grad,
        dtype=torch.int64 if dtype is None else dtype, layout=layout, device_mesh=device_mesh, placements=placements,
    )  # fmt: skip
