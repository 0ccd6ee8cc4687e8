"""Random ops under tracing (torch.compile, fake tensors): one custom op a row, so that a graph holds the draw and not
the moves of the generator around it.

The custom op takes the arguments of the aten op and the layout of the shards, writes none of them, and does when it runs
what eager mode does. Which shard is its own it works out then, from its rank: torch's compile caches hand one rank's graph to another
(PyTorch issue 185520), so no rank's coordinate may be in it.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library, register_fake
from torch.utils._python_dispatch import _disable_current_modes

from . import _random
from ._draw import draw_as_all
from ._ops import TABLE, RandomOp

NAMESPACE = "torch_dtensor_rng"
_LAYOUT = {
    "ranks": "int[]",
    "strides": "int[]",
    "sizes": "int[]",
    "weights": "int[]",
    "num_shards": "int",
    "step": "SymInt",
    "end": "SymInt",
}

# What a debug mode wants to be told when a graph draws.
watcher: Callable[[], None] | None = None

_library = Library(NAMESPACE, "FRAGMENT")


def _name(row: RandomOp) -> str:
    return row.overload.replace(".", "_")


def _schema(row: RandomOp) -> str:
    """The aten op's schema with the layout as further keyword arguments, without anything that is written, and with
    ``from`` under a name that graph code can write."""
    arguments, returns = re.fullmatch(r"[^(]*\((.*)\) -> (.*)", str(row.op._schema)).groups()  # type: ignore[union-attr]
    arguments, returns = (re.sub(r"\([a-z]!\)", "", one) for one in (arguments, returns))
    arguments = re.sub(r"\bfrom\b", "from_", arguments)
    star = "" if "*, " in arguments else "*, "
    layout = ", ".join(f"{kind} {name}" for name, kind in _LAYOUT.items())
    return f"{_name(row)}({arguments}, {star}{layout}) -> {returns}"


def _define(row: RandomOp) -> None:
    def run(
        local: torch.Tensor,
        *args: Any,
        ranks: list[int],
        strides: list[int],
        sizes: list[int],
        weights: list[int],
        num_shards: int,
        step: int,
        end: int,
        **kwargs: Any,
    ) -> Any:
        if watcher is not None:
            watcher()
        coordinate = _coordinate(dist.get_rank(), ranks, strides, sizes)
        layout = _random._ShardLayout(tuple(weights), num_shards, step, end)
        local = torch.empty_like(local) if row.in_place else local
        return draw_as_all(row, layout, coordinate, local, args, kwargs)

    def fake(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in _LAYOUT}
        return torch.empty_like(local) if row.in_place else (row.meta or row.call)(local, *args, **kwargs)

    # The tag keeps the partitioner from drawing once more in the backward graph.
    _library.define(_schema(row), tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(_name(row), run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{_name(row)}", fake, lib=_library)


_DEFINED = {row.overload: row for row in TABLE if row.functional is None}

for _row in _DEFINED.values():
    _define(_row)

# No two nodes of these may be merged into one. Where a graph has gradients, fx_graph_cse of torch._functorch.compile_utils
# goes by a list, and on torch 2.11 to 2.13 not by the tag.
RANDOM_PACKETS = tuple(getattr(getattr(torch.ops, NAMESPACE), _name(row)) for row in _DEFINED.values())

# Part of the key of torch's compile caches: a cached graph calls these ops, with places worked out by this version.
GRAPH_FORMAT = "2:" + hashlib.sha256("\n".join(map(_schema, _DEFINED.values())).encode()).hexdigest()[:16]


def _coordinate(rank: int, ranks: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The mesh coordinate of ``rank``: of itself on a regular mesh, else of its position in ``ranks``."""
    position = ranks.index(rank) if ranks else rank
    return [position // stride % size for stride, size in zip(strides, sizes)]


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
    """Records ``row`` on a traced local tensor; the generator moves when the graph runs.

    An in-place op is recorded as a functional one and a copy: of two in-place custom ops on empty tensors, inductor on
    torch 2.13 reads the second tensor before it is filled.
    """
    if row.functional is not None:
        out, written = call(_DEFINED[row.functional], mesh, layout, local, args, kwargs)
        args[0].copy_(written)
        return local.copy_(out) if row.in_place else out
    ranks, strides = _mesh_geometry(mesh, dist.get_rank())
    out = getattr(getattr(torch.ops, NAMESPACE), _name(row))(
        local,
        *args,
        **kwargs,
        ranks=ranks,
        strides=strides,
        sizes=mesh.shape,
        weights=layout.weights,
        num_shards=layout.num_shards,
        step=layout.step,
        end=layout.end,
    )
    return local.copy_(out) if row.in_place else out
