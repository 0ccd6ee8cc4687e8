"""Random ops under tracing (torch.compile, fake tensors): one custom op a row, so that a graph holds the draw and not
the moves of the generator around it.

The custom op takes the arguments of the aten op and the layout of the shards, and does when it runs what eager mode
does. Which shard is its own it asks the process groups of the mesh dims then: torch's compile caches hand one rank's
graph to another (PyTorch issue 185520), so no rank's coordinate may be in it.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import _random
from ._draw import draw
from ._ops import TABLE, RandomOp

NAMESPACE = "torch_dtensor_rng"
_LAYOUT = "str[] groups, int[] weights, int num_shards, SymInt step, SymInt end"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _name(row: RandomOp) -> str:
    return row.overload.replace(".", "_")


def _schema(row: RandomOp) -> str:
    """The aten op's schema with the layout as further keyword arguments. An in-place op returns nothing, as
    functionalisation asks of a custom op, and ``from`` gets a name that graph code can write."""
    arguments, returns = re.fullmatch(r"[^(]*\((.*)\) -> (.*)", str(row.op._schema)).groups()  # type: ignore[union-attr]
    arguments = re.sub(r"\bfrom\b", "from_", arguments)
    layout = _LAYOUT if "*, " in arguments else f"*, {_LAYOUT}"
    return f"{_name(row)}({arguments}, {layout}) -> {'()' if row.in_place else returns}"


def _define(row: RandomOp) -> None:
    def run(
        local: torch.Tensor,
        *args: Any,
        groups: list[str],
        weights: list[int],
        num_shards: int,
        step: int,
        end: int,
        **kwargs: Any,
    ) -> Any:
        coordinate = [dist.get_rank(_resolve_process_group(group)) for group in groups]
        plan = _random._ShardLayout(tuple(weights), num_shards, step, end).plan(coordinate)
        out = draw(row, plan, local, args, kwargs)
        return None if row.in_place else out

    def fake(
        local: torch.Tensor,
        *args: Any,
        groups: list[str],
        weights: list[int],
        num_shards: int,
        step: int,
        end: int,
        **kwargs: Any,
    ) -> Any:
        return None if row.in_place else row.call(local, *args, **kwargs)

    # The tag keeps the partitioner from drawing once more in the backward graph.
    _library.define(_schema(row), tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(_name(row), run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name(row)}", fake, lib=_library)


for _row in TABLE:
    _define(_row)


def call(row: RandomOp, spec: DTensorSpec, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records ``row`` on a traced local tensor; the generator moves when the graph runs."""
    layout = _random._layout_for(spec)
    sharding = [mesh_dim for mesh_dim, weight in enumerate(layout.weights) if weight]
    out = getattr(getattr(torch.ops, NAMESPACE), _name(row))(
        local,
        *args,
        **kwargs,
        groups=[spec.mesh.get_group(mesh_dim).group_name for mesh_dim in sharding],
        weights=[layout.weights[mesh_dim] for mesh_dim in sharding],
        num_shards=layout.num_shards,
        step=layout.step,
        end=layout.end,
    )
    return local if row.in_place else out
