"""Random ops on DTensors that are made of other ops on DTensors, those that torch decomposes, and those that raise.

Whatever draws here is a row of the table; DTensor's own rules place the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from . import _dispatch, _ops

aten = torch.ops.aten


def _normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> DTensor:
    # As normal_impl in ATen/native/DistributionTemplates.h, except that it does not look for a std below zero: on the
    # whole tensor that would take a collective, and on a rank alone it would leave the others waiting.
    tensors = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    if isinstance(std, torch.Tensor) and std.is_complex():
        raise RuntimeError("normal expects standard deviation to be non-complex")
    first: Any
    first, *_ = sorted(tensors, key=lambda one: not isinstance(one, DTensor))
    _dispatch.check_mixed(aten.normal.Tensor_Tensor, *tensors)
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    first = _dispatch.reduced(first)
    if first.shape != shape:
        first = aten.expand.default(first, shape)
    dtype = tensors[0].dtype  # that of the mean, if it is a tensor, were it a number's
    out = aten.empty_like.default(first, dtype=dtype, memory_format=torch.contiguous_format)
    if not isinstance(std, torch.Tensor):
        out = aten.normal_.default(out, 0.0, std, generator=generator)
        return aten.add_.Tensor(out, mean)
    out = aten.mul_.Tensor(aten.normal_.default(out, 0.0, 1.0, generator=generator), std)
    return aten.add_.Tensor(out, mean) if isinstance(mean, torch.Tensor) else aten.add_.Tensor(out, float(mean))


def _bernoulli(self: DTensor, p: torch.Tensor, *, generator: torch.Generator | None = None) -> DTensor:
    _dispatch.check_mixed(aten.bernoulli.Tensor, self, p, written=self)
    return aten.bernoulli_.Tensor(aten.empty_like.default(_dispatch.reduced(self)), p, generator=generator)


def _randint_like(self: DTensor, high: torch.Tensor, **kwargs: Any) -> DTensor:
    _dispatch.check_mixed(aten.randint_like.Tensor, self, high, written=self)
    if isinstance(high, DTensor):
        # Ranks outside the mesh have no value of it, and draw nothing.
        high = high.full_tensor() if high.device_mesh._is_current_rank_part_of_mesh() else torch.tensor(1)
    return torch.randint_like(self, int(high), **kwargs)  # type: ignore[return-value]


COMPOSED: dict[str, Callable[..., DTensor]] = {
    "normal.Tensor_Tensor": _normal,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "bernoulli.Tensor": _bernoulli,
    "randint_like.Tensor": _randint_like,
    "randint_like.Tensor_generator": _randint_like,
}


def _composed(function: Callable[..., DTensor]) -> _dispatch.Handler:
    return lambda op, args, kwargs: function(*args, **kwargs)


def _decompose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.decompose(*args, **kwargs)


def _elementwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A gradient of what was drawn, element by element, of tensors of one size."""
    _dispatch.check_mixed(op, *args)
    inputs = [one for one in args if isinstance(one, DTensor)]
    first = next((one for one in inputs if not any(p.is_partial() for p in one.placements)), inputs[0])
    first = _dispatch.reduced(first)

    def local(one: Any) -> Any:
        if isinstance(one, DTensor):
            return _dispatch.redistributed(one, first.placements)._local_tensor
        if isinstance(one, torch.Tensor):
            return distribute_tensor(one, first.device_mesh, first.placements, src_data_rank=None)._local_tensor
        return one

    stride = torch.empty(first.shape, device="meta").stride()
    out = op(*map(local, args), **kwargs).contiguous()
    return DTensor.from_local(
        out, first.device_mesh, first.placements, run_check=False, shape=first.shape, stride=stride
    )


def _cpu_attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's own path where nothing is dropped."""
    if (args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)) == 0:
        return _dispatch.run_by_torch(op, args, kwargs)
    return _refuse(_ops.REFUSED[_CPU_ATTENTION])(op, args, kwargs)


_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"


def _refuse(way_out: str) -> _dispatch.Handler:
    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError(f"{op}: this op is not supported on DTensors; {way_out}.")

    return handler


HANDLERS: dict[Any, _dispatch.Handler] = {
    **{_ops.overload(name): _composed(function) for name, function in COMPOSED.items()},
    **{_ops.overload(name): _decompose for name in _ops.DECOMPOSED},
    **{_ops.overload(name): _elementwise for name in _ops.GRADIENTS},
    **{_ops.overload(name): _refuse(way_out) for name, way_out in _ops.REFUSED.items() if _ops.exists(name)},
    _ops.overload(_CPU_ATTENTION): _cpu_attention,
    aten.resize_.default: _refuse(_ops.RESIZED),
}
