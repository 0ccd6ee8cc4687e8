"""A random op on a DTensor becomes the same op on the local tensor, run at the shard's place.

Each row of the table gets a handler, which torch's DTensor dispatch calls instead of its own path. The handler looks up
where the shard draws, moves the live generator of the *local tensor's* device there, runs the local op and moves the
generator to the place where every rank ends. Nothing here communicates, except the reduction of a ``Partial`` input.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._random as torch_random
from torch._C import _len_torch_dispatch_stack
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import LocalTensor, enabled_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import _random, _shard, _single_device, _traced
from ._draw import draw, draw_as_all
from ._ops import TABLE, Placed, RandomOp

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_OutputCache = dict[Any, tuple[DTensorSpec, ...]]
_Plan = _random._ShardPlan | _shard.ShardSlice | None


class _Known:
    """What is remembered of a spec object that this rank has drawn for: its shard's plan and its outputs' specs.

    Only specs that the quick path serves are remembered: this rank is part of the mesh and holds elements, sizes are
    plain integers and no placement is ``Partial``. The entry keeps the spec alive, so that its id stays its own.
    """

    __slots__ = ("outputs", "placements", "plan", "spec", "tensor_meta")

    def __init__(self, spec: DTensorSpec, plan: _Plan):
        self.spec = spec
        self.tensor_meta = spec.tensor_meta
        self.placements = spec.placements
        self.plan = plan
        self.outputs: _OutputCache = {}


_known: dict[int, _Known] = {}
_KNOWN_SPECS = 4096
_KNOWN_OUTPUTS = 64


def forget() -> None:
    """Forgets every spec, and which kernels have been looked at."""
    _known.clear()
    _single_device.forget()


class Policy:
    """How the place of a shard is chosen: ``offset``, or where ``exact``, ``single_device``.

    Args:
        exact: draw what one device would.
        strict: with ``exact``, whether an op that cannot raises; it warns once else.
    """

    def __init__(self, exact: bool = False, strict: bool = False):
        self.exact = exact
        self.strict = strict
        self._warned: set[str] = set()

    def handlers(self) -> dict[Any, Handler]:
        """What torch's dispatch calls for each row of the table."""
        return {row.op: make_handler(row, self) for row in TABLE}

    def draws_exactly(self, row: RandomOp, num_shards: int) -> bool:
        """Whether ``row`` draws what one device would.

        Raises:
            NotImplementedError: where it should and cannot, and this is strict; there is a warning else.
        """
        if not self.exact or row.fill is not None or num_shards == 1:
            return self.exact
        message = (
            f"{row.op}: cannot draw the numbers of one device for a sharded DTensor (policy 'single_device'): they depend "
            "on tensors, or on the sizes of the local call"
        )
        if self.strict:
            raise NotImplementedError(f"{message}. Redistribute the input to Replicate, or install with strict=False.")
        if row.overload not in self._warned:
            self._warned.add(row.overload)
            warnings.warn(
                f"{message}. Its shards draw different numbers, in step, as under policy 'offset'.", stacklevel=2
            )
        return False


def make_handler(row: RandomOp, policy: Policy) -> Handler:
    """The function that torch's dispatch calls for ``row``, with the op, its arguments and keyword arguments."""
    if row.placed is Placed.TORCH_RULE:
        return functools.partial(_run_by_torch_rule, row, policy)
    if _is_quick(row) and not (policy.exact and row.fill is None):
        return _quick_handler(row, policy)
    return functools.partial(_run_any, row, policy, _positional_generator(row))


def _is_quick(row: RandomOp) -> bool:
    """Whether a call is served from what is remembered of its first argument's spec: the plan is that of one value an
    element, all that varies is keyword arguments and numbers."""
    plain = row.placed is Placed.LIKE_INPUT and row.tensors == 1 and (row.values, row.least_span) == (1, 0)
    return plain and _positional_generator(row) is None


def _positional_generator(row: RandomOp) -> int | None:
    """Where in the op's arguments the generator is, unless it is a keyword."""
    for position, argument in enumerate(row.op._schema.arguments):
        if argument.name == "generator" and not argument.kwarg_only:
            return position
    return None


def _quick_handler(row: RandomOp, policy: Policy) -> Handler:
    in_place = row.in_place
    fills_output = policy.exact and not row.reads_input
    draw_local: Callable[..., Any] = _single_device.draw if policy.exact else draw

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
            or "memory_format" in kwargs
            or (tracker is not None and not tracker._use_distribute_region)
        ):
            out = _run(row, policy, x, args[1:], kwargs)
            _remember(spec, local, policy)
            return out
        if in_place:
            draw_local(row, known.plan, local, args[1:], kwargs)
            return x
        # Before the draw, as whatever it raises must find the generator where it was.
        specs = _output_specs(row, spec, args[1:], kwargs, known.outputs)
        if fills_output and specs[0].tensor_meta.stride != spec.tensor_meta.stride:  # type: ignore[union-attr]
            return _run(row, policy, x, args[1:], kwargs)  # its shard lies in memory otherwise
        return _wrap(draw_local(row, known.plan, local, args[1:], kwargs), specs)

    return handler


def _run_any(
    row: RandomOp, policy: Policy, generator_at: int | None, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if generator_at is not None and len(args) > generator_at:
        kwargs = {**kwargs, "generator": args[generator_at]}
        args = args[:generator_at]
    check_mixed(row.op, *args[: row.tensors], written=args[0] if row.in_place else None)
    x = args[0]
    if not isinstance(x, DTensor):
        x = _placed_like(x, next(one for one in args if isinstance(one, DTensor)))
    return _run(row, policy, x, args[1:], kwargs)


def _placed_like(x: torch.Tensor, other: DTensor) -> DTensor:
    """A plain tensor, the same on every rank, as a DTensor; spread like ``other`` if it broadcasts to that one's size."""
    placements: tuple[Placement, ...] = (Replicate(),) * other._spec.mesh.ndim
    if torch.broadcast_shapes(x.shape, other.shape) == other.shape:
        x, placements = x.expand(other.shape), _without_partial(other._spec.placements)
    return distribute_tensor(x, other._spec.mesh, placements, src_data_rank=None)


def check_mixed(op: Any, *tensors: Any, written: Any = None) -> None:
    """Raises RuntimeError for DTensors on different meshes, and, in torch's words, for a plain tensor where a DTensor is
    needed: one that is ``written``, or has dims, unless torch takes those for replicated ones (``implicit_replication``)."""
    implicit = DTensor._op_dispatcher._allow_implicit_replication
    for one in tensors:
        plain = isinstance(one, torch.Tensor) and not isinstance(one, DTensor)
        if plain and (one is written or (one.ndim and not implicit)):
            raise RuntimeError(
                f"{op}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before "
                "calling distributed operators!"
            )
    meshes = [one._spec.mesh for one in tensors if isinstance(one, DTensor)]
    for mesh in meshes[1:]:
        if mesh != meshes[0]:
            raise RuntimeError(
                f"{op}: got DTensors on different meshes, {meshes[0]} and {mesh}: bring them to one mesh before the call."
            )


def _regions_enabled() -> bool:
    tracker = torch_random._rng_tracker
    return tracker is None or tracker.distribute_region_enabled


def _is_partial(spec: DTensorSpec) -> bool:
    return any(placement.is_partial() for placement in spec.placements)


def check_in_place(op: Any, x: DTensor) -> None:
    """Raises RuntimeError for a draw into a DTensor with a ``Partial`` placement, or one that is expanded: on the ranks too
    that hold nothing of it."""
    if _is_partial(x._spec):
        raise RuntimeError(
            f"{op}: cannot draw in place into a DTensor with a Partial placement, found {x._spec.placements}: its "
            "ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first."
        )
    meta = x._spec.tensor_meta
    if meta is not None and any(stride == 0 and size > 1 for stride, size in zip(meta.stride, meta.shape)):
        raise RuntimeError(
            f"{op}: unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def _run(row: RandomOp, policy: Policy, x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any call: the first of a spec, and those that the quick path does not serve."""
    if row.in_place:
        check_in_place(row.op, x)
    elif row.tensors > 1 and not row.op._schema.is_mutable:
        shape = torch.broadcast_shapes(
            x.shape, *(one.shape for one in args[: row.tensors - 1] if isinstance(one, torch.Tensor))
        )
        x = x if x.shape == shape else aten.expand.default(x, shape)
    if row.reads_input:
        x = reduced(x, x._spec.ndim - 1 if row.placed is Placed.ROWS else None)
    spec, local = x._spec, x._local_tensor
    if not spec.mesh._is_current_rank_part_of_mesh():
        return _on_other_rank(row, x, args, kwargs)
    if kwargs.get("device") is not None:
        # The draw is made on that device, by its generator; the input only lends its layout.
        local = torch.empty_like(local, device=kwargs["device"])
    specs = () if row.in_place else _output_specs(row, spec, args, kwargs, None)
    if row.tensors > 1:
        args = tuple(
            _aligned(row, position, other, spec, local) if position < row.tensors else other
            for position, other in enumerate(args, start=1)
        )
    # A kernel goes through what it fills; that of native_dropout through what it reads.
    filled = spec if row.in_place or row.reads_input else specs[0]
    out = _on_local(row, policy, filled, _layout_of(row, spec), local, args, kwargs)
    return x if row.in_place else _wrap(out, specs)


def _layout_of(row: RandomOp, spec: DTensorSpec) -> _random._ShardLayout:
    return _random._layout_for(spec, row.values, row.least_span)


def _remember(spec: DTensorSpec, local: torch.Tensor, policy: Policy) -> None:
    if local.is_meta or type(local) is not torch.Tensor or _is_partial(spec) or _are_we_tracing():
        return
    if not local.numel():  # its arguments are to be looked at in every call
        return
    if not spec.mesh._is_current_rank_part_of_mesh():
        return
    place = _random._plan_for(spec)
    plan: _Plan = place
    if policy.exact:
        plan = _shard.shard_of(spec, _random._coordinate(spec.mesh))
        if not plan.is_dense:  # what is made of it has other strides
            return
        if _is_whole(spec, place.num_shards, local):
            plan = None
    if len(_known) >= _KNOWN_SPECS:
        _known.clear()
    _known[id(spec)] = _Known(spec, plan)


def _without_partial(placements: tuple[Placement, ...], whole: int | None = None) -> tuple[Placement, ...]:
    """``Replicate`` for every ``Partial``, and for every shard of the tensor dim ``whole``."""
    return tuple(
        Replicate() if one.is_partial() or (whole is not None and getattr(one, "dim", None) == whole) else one
        for one in placements
    )


def reduced(x: DTensor, whole: int | None = None) -> DTensor:
    """``x`` with its ``Partial`` placements reduced, and its tensor dim ``whole`` not sharded. Communicates if there are
    any of them."""
    return redistributed(x, _without_partial(x._spec.placements, whole))


def redistributed(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``x`` with other placements; itself if it has them. Communicates otherwise."""
    return x if placements == x._spec.placements else x.redistribute(placements=placements)


def _aligned(row: RandomOp, position: int, other: Any, spec: DTensorSpec, local: torch.Tensor) -> torch.Tensor:
    """The local part of a further tensor argument, brought to the first one's sizes and placements."""
    if isinstance(other, DTensor) and (
        (other._spec.shape, other._spec.placements, other._spec.mesh) == (spec.shape, spec.placements, spec.mesh)
    ):
        return other._local_tensor
    argument = row.op._schema.arguments[position]
    if argument.is_write:
        raise RuntimeError(
            f"{row.op}: argument '{argument.name}' is written, and so has to be laid out like the first one, of shape "
            f"{tuple(spec.shape)} and placements {spec.placements}, found "
            f"{tuple(other.shape)} and {other.placements if isinstance(other, DTensor) else 'a torch.Tensor'}. "
            "Redistribute the input to Replicate or Shard before the call, if it has a Partial placement."
        )
    if not isinstance(other, torch.Tensor):
        raise TypeError(
            f"{row.op}: argument '{argument.name}' (position {position + 1}) must be Tensor, not {type(other).__name__}"
        )
    meta = TensorMeta(spec.shape, spec.tensor_meta.stride, other.dtype)  # type: ignore[union-attr]
    like = DTensor(torch.empty_like(local, dtype=other.dtype), _spec_like(spec, meta), requires_grad=False)  # type: ignore[call-arg]
    return aten.copy_.default(like, other)._local_tensor


def _on_local(
    row: RandomOp,
    policy: Policy,
    filled: DTensorSpec,
    layout: _random._ShardLayout,
    local: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The op on local tensors, at the place of this rank's shard. ``filled`` is the spec of what its kernel goes through."""
    if local.is_meta or not _regions_enabled():
        return row.call(local, *args, **kwargs)
    generator = kwargs.get("generator")
    if generator is not None:
        _random._check_generator(generator, local.device)
    mesh = filled.mesh
    exact = policy.draws_exactly(row, layout.num_shards)
    mode = enabled_local_tensor_mode() if isinstance(local, LocalTensor) else None
    if mode is not None and mode._per_rank_rng_states:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if exact:
            draw_on = functools.partial(_draw_exactly, row, filled, layout.num_shards)
            out = _on_each_simulated_rank(mode, mesh, generator, local.device, draw_on, (local, *args), kwargs)
            return local if row.in_place else out
        with _random._local_tensor_region(mode, mesh, layout, generator, local.device):
            return row.call(local, *args, **kwargs)
    if _are_we_tracing():
        if exact and (row.fill is None or _is_whole(filled, layout.num_shards, local)):
            return _traced.call_plain(row, mesh, local, args, kwargs)
        if exact:
            return _traced.call_exactly(row, filled, local, args, kwargs)
        return _traced.call(row, mesh, layout, local, args, kwargs)
    if exact:
        return _draw_exactly(row, filled, layout.num_shards, _random._coordinate(mesh), (local, *args), kwargs)
    return draw_as_all(row, layout, _random._coordinate(mesh), local, args, kwargs)


def _draw_exactly(
    row: RandomOp,
    filled: DTensorSpec,
    num_shards: int,
    coordinate: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    whole = row.fill is None or _is_whole(filled, num_shards, args[0])
    shard = None if whole else _shard.shard_of(filled, coordinate)
    return _single_device.draw(row, shard, args[0], args[1:], kwargs)


def _is_whole(spec: DTensorSpec, num_shards: int, local: torch.Tensor) -> bool:
    """Whether the plain call on ``local`` is the plain call on the whole: torch's own functions make replicated DTensors
    whose local tensors lie in memory otherwise than the spec says."""
    return num_shards == 1 and local.stride() == spec.tensor_meta.stride  # type: ignore[union-attr]


def _on_each_simulated_rank(
    mode: Any,
    mesh: DeviceMesh,
    generator: torch.Generator | None,
    device: torch.device,
    draw_on: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``draw_on(coordinate, args, kwargs)`` returns on each rank that LocalTensorMode plays, with the rank's state, or
    from that of ``generator``, in the default generators."""
    from torch.distributed import _local_tensor

    coordinate = _random._coordinate(mesh)
    states = mode._per_rank_rng_states
    before = dict(states)
    given = None if generator is None else generator.get_state()
    default = _random._default_generator(device)
    ours = _local_tensor._get_rng_state()
    outs = {}
    try:
        with mode.disable():
            for rank in sorted(mode.ranks):
                _local_tensor._set_rng_state(*before[rank])
                if given is not None:
                    default.set_state(given)
                at = [_local_tensor._map_to_rank_local_val(index, rank) for index in coordinate]
                of_rank = tuple(one._local_tensors[rank] if isinstance(one, LocalTensor) else one for one in args)
                outs[rank] = draw_on(at, of_rank, kwargs)
                states[rank] = _local_tensor._get_rng_state()
        if generator is not None:
            generator.set_state(default.get_state())  # the same on every rank
            states.update(before)
    except BaseException:
        states.update(before)
        raise
    finally:
        _local_tensor._set_rng_state(*ours)
    if isinstance(outs[rank], torch.Tensor):
        return LocalTensor(outs)
    return tuple(LocalTensor(dict(zip(outs, parts))) for parts in zip(*outs.values()))


def _placed_by_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    if info.output_sharding is None:
        raise AssertionError("torch's rule says how the outputs are placed")
    return info, info.output_sharding


def run_by_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by torch's own path, as if it had no handler."""
    info, sharding = _placed_by_torch(op, args, kwargs)
    results = DTensor._op_dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return DTensor._op_dispatcher.wrap(results, sharding.output_spec)


def _run_by_torch_rule(row: RandomOp, policy: Policy, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention: torch's own rule says how the inputs and outputs are placed; the dropout of each shard of the batch and
    the heads is drawn at its own place."""
    dispatcher = DTensor._op_dispatcher
    info, sharding = _placed_by_torch(op, args, kwargs)
    named = dict(zip((one.name for one in op._schema.arguments), args)) | kwargs
    if not named.get("dropout_p") or not info.compute_mesh._is_current_rank_part_of_mesh():
        return run_by_torch(op, args, kwargs)
    if sharding.needs_redistribute:
        if sharding.redistribute_schema is None:
            raise AssertionError("torch's rule says how to redistribute")
        dispatcher.redistribute_local_args(
            info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    local, *others = info.local_args
    out: DTensorSpec = sharding.output_spec[0]  # type: ignore[index, assignment]
    layout = _attention_layout(out, named["query"].shape, named["key"].shape)
    results = _on_local(row, policy, out, layout, local, tuple(others), info.local_kwargs)  # type: ignore[arg-type]
    return dispatcher.wrap(results, sharding.output_spec)


def _attention_layout(out: DTensorSpec, query: torch.Size, key: torch.Size) -> _random._ShardLayout:
    """One value for each score of each head of each sample, or as many as the flash kernel takes for a head at least
    (ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    scores = query[-2] * key[-2]
    return _random._layout((*query[:-2], max(scores, 32)), out.placements, out.mesh.shape)


def _spec_like(spec: DTensorSpec, tensor_meta: TensorMeta | None) -> DTensorSpec:
    """``spec`` for a tensor of other sizes or dtype, with every ``Partial`` placement made ``Replicate``."""
    new = copy.copy(spec)
    new.tensor_meta = tensor_meta
    if _is_partial(spec):
        new.placements = _without_partial(spec.placements)
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
    if row.tensors > 1:
        args = tuple(
            torch.empty(one.shape, dtype=one.dtype, device="meta") if isinstance(one, torch.Tensor) else one
            for one in args
        )
    like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    outs = (row.meta or row.call)(like, *args, **kwargs)
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


HANDLERS: dict[Any, Handler] = Policy().handlers()
