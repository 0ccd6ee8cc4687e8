"""A random op on a DTensor becomes the same op on the local tensor, run at the shard's place.

Each row of the table gets a handler, which torch's DTensor dispatch calls instead of its own path. The handler looks up
where the shard draws, moves the live generator of the *local tensor's* device there, runs the local op and moves the
generator to the place where every rank ends. Nothing here communicates, except the reduction of a ``Partial`` input.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor._random as torch_random
from torch._C import _len_torch_dispatch_stack
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import LocalTensor, enabled_local_tensor_mode
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from . import _random, _traced
from ._draw import draw
from ._ops import TABLE, RandomOp

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_OutputCache = dict[Any, tuple[DTensorSpec, ...]]


class _Known:
    """What is remembered of a spec object that this rank has drawn for: its shard's plan and its outputs' specs.

    Only specs that the quick path serves are remembered: this rank is part of the mesh, sizes are plain integers and
    no placement is ``Partial``. The entry keeps the spec alive, so that its id stays its own.
    """

    __slots__ = ("outputs", "placements", "plan", "spec", "tensor_meta")

    def __init__(self, spec: DTensorSpec, plan: _random._ShardPlan):
        self.spec = spec
        self.tensor_meta = spec.tensor_meta
        self.placements = spec.placements
        self.plan = plan
        self.outputs: _OutputCache = {}


_known: dict[int, _Known] = {}
_KNOWN_SPECS = 4096
_KNOWN_OUTPUTS = 64


def forget() -> None:
    """Forgets every spec."""
    _known.clear()


def make_handler(row: RandomOp) -> Handler:
    """The function that torch's dispatch calls for ``row``, with the op, its arguments and keyword arguments."""
    in_place = row.in_place

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        spec = x._spec
        local = x._local_tensor
        known = _known.get(id(spec))
        tracker = torch_random._rng_tracker
        if (
            known is None
            or known.tensor_meta is not spec.tensor_meta
            or known.placements is not spec.placements
            or type(local) is not torch.Tensor
            or _len_torch_dispatch_stack()
            or local.is_meta
            or "device" in kwargs
            or (tracker is not None and not tracker._use_distribute_region)
        ):
            return _run(row, x, args[1:], kwargs)
        if in_place:
            draw(row, known.plan, local, args[1:], kwargs)
            return x
        # Before the draw, as whatever it raises must find the generator where it was.
        specs = _output_specs(row, spec, args[1:], kwargs, known.outputs)
        return _wrap(draw(row, known.plan, local, args[1:], kwargs), specs)

    return handler


HANDLERS: dict[Any, Handler] = {row.op: make_handler(row) for row in TABLE}


def _regions_enabled() -> bool:
    tracker = torch_random._rng_tracker
    return tracker is None or tracker.distribute_region_enabled


def _is_partial(spec: DTensorSpec) -> bool:
    return any(placement.is_partial() for placement in spec.placements)


def _run(row: RandomOp, x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any call: the first of a spec, and those that the quick path does not serve."""
    spec, local = x._spec, x._local_tensor
    if row.in_place and _is_partial(spec):
        raise RuntimeError(
            f"{row.op}: cannot draw in place into a DTensor with a Partial placement, found {spec.placements}: its "
            "ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first."
        )
    if not spec.mesh._is_current_rank_part_of_mesh():
        return _on_other_rank(row, x, args, kwargs)
    if row.reads_input and _is_partial(spec):
        reduced = _spec_like(spec, spec.tensor_meta)
        spec, local = reduced, redistribute_local_tensor(local, spec, reduced)
    if kwargs.get("device") is not None:
        # The draw is made on that device, by its generator; the input only lends its layout.
        local = torch.empty_like(local, device=kwargs["device"])
    if row.in_place:
        _on_local(row, spec, local, args, kwargs)
        return x
    specs = _output_specs(row, spec, args, kwargs, None)
    return _wrap(_on_local(row, spec, local, args, kwargs), specs)


def _on_local(
    row: RandomOp, spec: DTensorSpec, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if local.is_meta or not _regions_enabled():
        return row.call(local, *args, **kwargs)
    generator = kwargs.get("generator")
    if generator is not None:
        _random._check_generator(generator, local.device)
    mode = enabled_local_tensor_mode() if isinstance(local, LocalTensor) else None
    if mode is not None and mode._per_rank_rng_states:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        with _random._local_tensor_region(mode, spec, generator, local.device):
            return row.call(local, *args, **kwargs)
    if _are_we_tracing():
        return _traced.call(row, spec, local, args, kwargs)
    plan = _random._plan_for(spec)
    if not _is_partial(spec):
        if len(_known) >= _KNOWN_SPECS:
            _known.clear()
        _known[id(spec)] = _Known(spec, plan)
    return draw(row, plan, local, args, kwargs)


def _spec_like(spec: DTensorSpec, tensor_meta: TensorMeta | None) -> DTensorSpec:
    """``spec`` for a tensor of other sizes or dtype, with every ``Partial`` placement made ``Replicate``."""
    new = copy.copy(spec)
    new.tensor_meta = tensor_meta
    if _is_partial(spec):
        new.placements = tuple(Replicate() if one.is_partial() else one for one in spec.placements)
    return new


def _output_specs(
    row: RandomOp, spec: DTensorSpec, args: tuple[Any, ...], kwargs: dict[str, Any], cache: _OutputCache | None
) -> tuple[DTensorSpec, ...]:
    """The specs of the op's outputs: the input's placements, and the sizes, strides and dtypes that the op gives to
    a tensor of the global sizes."""
    if "generator" in kwargs or "device" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "device")}
    key = (row.overload, args, *kwargs.items())
    if cache is not None and (specs := cache.get(key)) is not None:
        return specs
    meta = spec.tensor_meta
    if meta is None:
        raise AssertionError("the spec of a DTensor has its tensor_meta")
    outs = row.call(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta"), *args, **kwargs)
    if isinstance(outs, torch.Tensor):
        outs = (outs,)
    specs = tuple(_spec_like(spec, TensorMeta(out.shape, out.stride(), out.dtype)) for out in outs)
    if cache is not None:
        if len(cache) >= _KNOWN_OUTPUTS:
            cache.clear()
        cache[key] = specs
    return specs


def _wrap(out: Any, specs: tuple[DTensorSpec, ...]) -> Any:
    if isinstance(out, torch.Tensor):
        return DTensor(out, specs[0], requires_grad=False)  # type: ignore[call-arg, arg-type]
    return tuple(DTensor(one, spec, requires_grad=False) for one, spec in zip(out, specs))  # type: ignore[call-arg, arg-type]


def _on_other_rank(row: RandomOp, x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A rank outside the mesh draws nothing and is not advanced; what it returns is empty, as from any DTensor op."""
    if row.in_place:
        return x
    specs = _output_specs(row, x._spec, args, kwargs, None)
    outs = tuple(x._local_tensor.new_empty(0, dtype=spec.tensor_meta.dtype) for spec in specs)  # type: ignore[union-attr]
    return _wrap(outs if len(outs) > 1 else outs[0], specs)
