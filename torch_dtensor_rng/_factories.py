"""Factories of random DTensors, with ``generator=``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ._dispatch import HANDLERS, check_in_place

aten = torch.ops.aten
_empty: Callable[..., DTensor] = dtensor.empty


def _fill(
    op: Any, args: tuple[Any, ...], size: Any, generator: torch.Generator | None, requires_grad: bool, **kwargs: Any
) -> DTensor:
    _check_is_generator(generator)
    with torch.no_grad():
        x = _empty(*size, requires_grad=requires_grad, **kwargs)
        handler = DTensor._op_dispatcher._custom_op_handlers.get(op, HANDLERS[op])  # a debug mode's, if there is one
        handler(op, (x, *args), {} if generator is None else {"generator": generator})
    return x


def _check_is_generator(generator: torch.Generator | None) -> None:
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"argument 'generator' must be a torch.Generator, not {type(generator).__name__}")


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


def normal(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A :class:`DTensor` of random numbers from the normal distribution. Other arguments and errors as in
    :func:`rand`. Does not communicate. With a ``mean`` or ``std`` that is a DTensor, use :func:`torch.normal`.

    Args:
        mean (float): the mean.
        std (float): the standard deviation, 0 or more.
        size (Sequence[int]): the global shape.
    """
    return _fill(
        aten.normal_.default, (mean, std), (size,), generator, requires_grad,
        dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements,
    )  # fmt: skip


def bernoulli(
    p: float,
    size: Sequence[int],
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A :class:`DTensor` of zeros and ones, each one with probability ``p``. Other arguments and errors as in
    :func:`rand`. Does not communicate. With probabilities that are a DTensor, use :func:`torch.bernoulli`.

    Args:
        p (float): the probability of a one, in ``[0, 1]``.
        size (Sequence[int]): the global shape.

    Keyword args:
        dtype (:class:`torch.dtype`): any dtype. Default: :func:`torch.get_default_dtype`.
    """
    return _fill(
        aten.bernoulli_.float, (p,), (size,), generator, requires_grad,
        dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements,
    )  # fmt: skip


def randperm(
    n: int,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A :class:`DTensor` of a random permutation of the integers from ``0`` to ``n - 1``: the one that
    :func:`torch.randperm` draws on one device, whatever the placements. Every rank draws all of it, and keeps its part.
    Other arguments and errors as in :func:`rand`. Does not communicate.

    Args:
        n (int): how many integers, 0 or more.

    Keyword args:
        dtype (:class:`torch.dtype`): Default: ``torch.int64``.
    """
    _check_is_generator(generator)
    with torch.no_grad():
        x = _empty(
            n, requires_grad=requires_grad, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements
        )
        check_in_place("randperm", x)
        if x.device_mesh._is_current_rank_part_of_mesh():
            x = around(_draw_permutation)("torch_dtensor_rng.randperm", (x,), {"generator": generator})
    return x.requires_grad_() if requires_grad else x  # type: ignore[return-value]


def _draw_permutation(op: str, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    (x,) = args
    whole = torch.randperm(x.shape[0], dtype=x.dtype, device=x._local_tensor.device, **kwargs)
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(whole, x.device_mesh, everywhere, run_check=False).redistribute(placements=x.placements)


def around(handler: Callable[..., Any]) -> Callable[..., Any]:
    """What a debug mode puts around a draw that is not made by a handler of torch's dispatch."""
    return handler
