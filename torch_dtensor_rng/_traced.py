"""Random ops under tracing (torch.compile, fake tensors): one custom op a row, so that a graph holds the draw and not
the moves of the generator around it.

The custom op takes the arguments of the aten op and the layout of the shards, writes none of them, and does when it runs
what eager mode does. Which shard is its own it works out then, from its rank: torch's compile caches hand one rank's graph to another
(PyTorch issue 185520), so no rank's coordinate may be in it.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import Library, register_fake
from torch.utils._python_dispatch import _disable_current_modes

from . import _random, _shard, _single_device
from ._draw import draw_as_all
from ._ops import TABLE, RandomOp

NAMESPACE = "torch_dtensor_rng"
_EXACT = "exact_"
_PASSED = "passed_"
# Where a rank is on the mesh, and the draw before this one in the graph, by its last output: no two may change places.
_MESH = {"after": "Tensor?", "ranks": "int[]", "mesh_strides": "int[]", "mesh_shape": "int[]"}
# Policy offset; an ``end`` below 0 is where the plain call on the local tensor ends.
_LAYOUT = {**_MESH, "weights": "int[]", "num_shards": "int", "step": "SymInt", "end": "SymInt"}
# Policy single_device: what the kernel goes through. Of each mesh dim the tensor dim that it shards, or -1, and the
# split_factor of a _StridedShard, or 0; of each tensor dim that is sharded in another order than the mesh's, this order.
_WHOLE = {
    **_MESH,
    "whole_shape": "SymInt[]",
    "whole_stride": "SymInt[]",
    "dims": "int[]",
    "split_factors": "int[]",
    "order": "int[]",
}

# Of a generator that was passed.
_HANDLE = {"handle": "int"}

# What a debug mode wants to be told when a graph draws.
watcher: Callable[[], None] | None = None

# The generators that compiled functions were passed: a graph holds the position.
_generators: list[torch.Generator] = []

# Of a graph that is made: the last output of its last draw.
_last_draws: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()

_schemas: dict[str, str] = {}
_library = Library(NAMESPACE, "FRAGMENT")


def _name(row: RandomOp) -> str:
    return row.overload.replace(".", "_")


def _schema(row: RandomOp, name: str, places: dict[str, str]) -> str:
    """The aten op's schema with ``places`` as further keyword arguments, without anything that is written, without its
    generator, with ``from`` under a name that graph code can write, and with one more, empty output."""
    arguments, returns = re.fullmatch(r"[^(]*\((.*)\) -> (.*)", str(row.op._schema)).groups()  # type: ignore[union-attr]
    arguments, returns = (re.sub(r"\([a-z]!\)", "", one) for one in (arguments, returns))
    arguments = re.sub(r"\bfrom\b", "from_", re.sub(r", Generator\? generator(=None)?", "", arguments))
    star = "" if "*" in arguments else "*, "
    further = ", ".join(f"{kind} {one}" for one, kind in places.items())
    return f"{name}({arguments}, {star}{further}) -> ({returns.strip('()')}, Tensor)"


def _define(
    row: RandomOp, name: str, places: dict[str, str], draw_at: Callable[[RandomOp, dict[str, Any], Any, Any, Any], Any]
) -> None:
    passed = "handle" in places

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if watcher is not None:
            watcher()
        at = {one: kwargs.pop(one) for one in places}
        if passed:
            kwargs["generator"] = generator_at(at["handle"])
        return _and_empty(local, draw_at(row, at, torch.empty_like(local) if row.in_place else local, args, kwargs))

    def fake(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs = {one: value for one, value in kwargs.items() if one not in places}
        outs = torch.empty_like(local) if row.in_place else (row.meta or row.call)(local, *args, **kwargs)
        return _and_empty(local, outs)

    # The first tag keeps the partitioner from drawing once more in the backward graph; the second keeps inductor from
    # capturing what a CUDA graph of its own does not know the generator of.
    seeded, uncapturable = torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe
    schema = _schema(row, name, places)
    _library.define(schema, tags=(seeded, uncapturable) if passed else (seeded,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _schemas[name] = schema


def _and_empty(local: torch.Tensor, outs: Any) -> tuple[Any, ...]:
    empty = torch.empty(0, device=local.device)
    return (outs, empty) if isinstance(outs, torch.Tensor) else (*outs, empty)


def _draw_in_layout(
    row: RandomOp, at: dict[str, Any], local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if at["end"] < 0:
        return row.call(local, *args, **kwargs)
    layout = _random._ShardLayout(tuple(at["weights"]), at["num_shards"], at["step"], at["end"])
    return draw_as_all(row, layout, _coordinate(dist.get_rank(), at), local, args, kwargs)


def _draw_of_whole(
    row: RandomOp, at: dict[str, Any], local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    place = [tuple(at[one]) for one in ("whole_shape", "whole_stride", "mesh_shape", "dims", "split_factors", "order")]
    return _single_device.draw(row, _shard_at(*place, tuple(_coordinate(dist.get_rank(), at))), local, args, kwargs)


class _Spec(NamedTuple):
    """Of a DTensorSpec what says which part a rank holds."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: Any
    tensor_meta: Any
    shard_order: tuple[Any, ...]


class _Sizes(NamedTuple):
    shape: tuple[int, ...]


class _Strides(NamedTuple):
    stride: tuple[int, ...]


class _Order(NamedTuple):
    tensor_dim: int
    mesh_dims: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _shard_at(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    dims: tuple[int, ...],
    split_factors: tuple[int, ...],
    order: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> _shard.ShardSlice:
    placements = tuple(
        Replicate() if dim < 0 else _StridedShard(dim, split_factor=factor) if factor else Shard(dim)
        for dim, factor in zip(dims, split_factors)
    )
    orders = [_Order(dim, tuple(mesh_dim for mesh_dim in order if dims[mesh_dim] == dim)) for dim in {*dims} - {-1}]
    spec = _Spec(shape, placements, _Sizes(mesh_shape), _Strides(stride), tuple(orders) if order else ())
    return _shard.shard_of(spec, coordinate)  # type: ignore[arg-type]


def handle_of(generator: torch.Generator) -> int:
    """What stands for ``generator`` in the graphs of this process. It is kept until :func:`forget`."""
    for handle, one in enumerate(_generators):
        if one is generator:
            return handle
    _generators.append(generator)
    return len(_generators) - 1


def generator_at(handle: int) -> torch.Generator:
    """The generator for which ``handle`` stands."""
    return _generators[handle]


def forget() -> None:
    """Lets go of the generators, when there are no graphs any more."""
    _generators.clear()


_DEFINED = {row.overload: row for row in TABLE if row.functional is None}

for _row in _DEFINED.values():
    _takes_generator = any(one.name == "generator" for one in _row.op._schema.arguments)
    for _prefix, _places, _draw_at in (("", _LAYOUT, _draw_in_layout), (_EXACT, _WHOLE, _draw_of_whole)):
        if _prefix != _EXACT or _row.fill is not None:
            _define(_row, _prefix + _name(_row), _places, _draw_at)
            if _takes_generator:
                _define(_row, _PASSED + _prefix + _name(_row), {**_HANDLE, **_places}, _draw_at)

# No two nodes of these may be merged into one. Where a graph has gradients, fx_graph_cse of torch._functorch.compile_utils
# goes by a list, and on torch 2.11 to 2.13 not by the tag.
RANDOM_PACKETS = tuple(getattr(getattr(torch.ops, NAMESPACE), name) for name in _schemas)

# Part of the key of torch's compile caches: a cached graph calls these ops, with places worked out by this version.
GRAPH_FORMAT = "6:" + hashlib.sha256("\n".join(_schemas.values()).encode()).hexdigest()[:16]


def _coordinate(rank: int, at: dict[str, Any]) -> list[int]:
    """The mesh coordinate of ``rank``: of itself on a regular mesh, else of its position in ``ranks``."""
    position = at["ranks"].index(rank) if at["ranks"] else rank
    return [position // stride % size for stride, size in zip(at["mesh_strides"], at["mesh_shape"])]


@functools.lru_cache(maxsize=64)
def _mesh_geometry(mesh: DeviceMesh, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks, strides): how any rank finds its coordinate. On a regular mesh, one dim of which is a stride in the
    global ranks, ``ranks`` is empty and ``strides`` are the same on every rank, sub-meshes included."""
    with _disable_current_modes():
        table = mesh.mesh
        origin = int(table.flatten()[0])
        strides = tuple(
            int(table.select(dim, min(1, size - 1)).flatten()[0]) - origin or 1 for dim, size in enumerate(table.shape)
        )
        indices = torch.meshgrid(*map(torch.arange, table.shape), indexing="ij")
        if all(
            torch.equal(table // stride % size, index) for stride, size, index in zip(strides, table.shape, indices)
        ):
            return (), strides
        return tuple(table.flatten().tolist()), torch.empty(table.shape).stride()


def call(
    row: RandomOp,
    mesh: DeviceMesh,
    layout: _random._ShardLayout,
    local: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Records ``row`` under policy offset on a traced local tensor; the generator moves when the graph runs."""
    return _record(row, "", mesh, layout._asdict(), local, args, kwargs)


def call_plain(
    row: RandomOp, mesh: DeviceMesh, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Records the plain call on a traced local tensor."""
    return call(row, mesh, _random._ShardLayout((), 1, 0, -1), local, args, kwargs)


def call_exactly(
    row: RandomOp, filled: DTensorSpec, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Records ``row`` under policy single_device on a traced local tensor; ``filled`` is the spec of what its kernel goes
    through."""
    dims, split_factors = [], []
    for placement in filled.placements:
        sharded = isinstance(placement, Shard | _StridedShard)
        dims.append(placement.dim if sharded else -1)  # type: ignore[attr-defined]
        split_factors.append(placement.split_factor if isinstance(placement, _StridedShard) else 0)
    order = [mesh_dim for one in filled.shard_order or () for mesh_dim in one.mesh_dims]
    at = {
        "whole_shape": tuple(filled.shape),
        "whole_stride": tuple(filled.tensor_meta.stride),  # type: ignore[union-attr]
        "dims": dims,
        "split_factors": split_factors,
        "order": order,
    }
    return _record(row, _EXACT, filled.mesh, at, local, args, kwargs)


def _record(
    row: RandomOp,
    prefix: str,
    mesh: DeviceMesh,
    at: dict[str, Any],
    local: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """An in-place op is recorded as a functional one and a copy: of two in-place custom ops on empty tensors, inductor on
    torch 2.13 reads the second tensor before it is filled.
    """
    if row.functional is not None:
        out, written = _record(_DEFINED[row.functional], prefix, mesh, at, local, args, kwargs)
        args[0].copy_(written)
        return local.copy_(out) if row.in_place else out
    if "generator" in kwargs:
        kwargs = dict(kwargs)
        if (generator := kwargs.pop("generator")) is not None:
            prefix, at = _PASSED + prefix, {"handle": handle_of(generator), **at}
    ranks, strides = _mesh_geometry(mesh, dist.get_rank())
    op = getattr(getattr(torch.ops, NAMESPACE), prefix + _name(row))
    proxies = get_proxy_mode()
    after = None if proxies is None else _last_draws.get(proxies.tracer)
    *outs, last = op(
        local, *args, **kwargs, after=after, ranks=ranks, mesh_strides=strides, mesh_shape=mesh.shape, **at
    )
    if proxies is not None:
        _last_draws[proxies.tracer] = last
    if row.in_place:
        return local.copy_(outs[0])
    return outs[0] if len(outs) == 1 else tuple(outs)
