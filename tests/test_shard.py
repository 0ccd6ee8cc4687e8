"""The global indices that a local tensor holds, against the tensors that torch itself cuts."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import coordinates, each_rank, gloo

from torch_dtensor_rng._shard import held_ranges


class Sharding(NamedTuple):
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]


@st.composite
def shardings(draw: Any) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda one: math.prod(one) < 13))
    )
    placements: list[Any] = []
    for mesh_dim in range(len(mesh_shape)):
        dim = draw(st.integers(0, len(shape) - 1))
        # FSDP2 x TP: a mesh dim shards what later mesh dims have sharded before it.
        later = math.prod(mesh_shape[mesh_dim + 1 :])
        chunks = draw(st.sampled_from([later, 1, 2, 3, 5]))
        placements.append(
            draw(st.sampled_from([Shard(dim), Shard(dim), Replicate(), Partial("avg"), _StridedShard(dim, split_factor=chunks)]))
        )  # fmt: skip
    return Sharding(shape, mesh_shape, tuple(placements))


def check(held: Any, whole: torch.Tensor, local: torch.Tensor) -> None:
    """That ``held`` are the ranges of ``local``, which was cut from ``whole``, an arange; adjacent ones are one."""
    indices = [torch.tensor([i for one in ranges for i in range(*one)], dtype=torch.int64) for ranges in held]
    assert len(held) == whole.ndim
    for dim, index in enumerate(indices):
        whole = whole.index_select(dim, index)
    assert torch.equal(whole, local)
    for ranges in held:
        edges = [edge for one in ranges for edge in one]
        assert edges == sorted(set(edges)), "neither empty nor adjacent"


@settings(max_examples=400, deadline=None)
@given(shardings())
@example(Sharding((), (2,), (Replicate(),)))
@example(Sharding((13, 2), (2, 2), (Shard(0), Shard(0))))
@example(Sharding((13, 2), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))))
@example(Sharding((12,), (2, 3, 2), (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0))))
@example(Sharding((13,), (2, 2), (_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=3))))
@example(Sharding((5, 0, 1), (4, 2), (Shard(0), Shard(2))))
def test_what_distribute_tensor_cuts(sharding):
    shape, mesh_shape, placements = sharding
    whole = torch.arange(math.prod(shape)).reshape(shape)

    def on_rank(rank: int, mesh: DeviceMesh) -> DTensor:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    for coordinate, x in zip(coordinates(mesh_shape), each_rank(mesh_shape, on_rank)):
        check(held_ranges(x._spec, coordinate), whole, x._local_tensor)


def fsdp_over_tensor_parallelism(rank: int) -> list[tuple[Any, Any, list[Any]]]:
    """The shape, what is held, and the local tensor of each parameter, whose elements count from 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    coordinate = [mesh.get_local_rank("dp"), mesh.get_local_rank("tp")]
    return [(tuple(p.shape), held_ranges(p._spec, coordinate), p.to_local().tolist()) for p in model.parameters()]


def test_what_fsdp2_over_tensor_parallelism_cuts():
    for parameters in gloo(4, fsdp_over_tensor_parallelism):
        assert len(parameters) == 4
        for shape, held, local in parameters:
            check(held, torch.arange(math.prod(shape)).reshape(shape), torch.tensor(local, dtype=torch.int64))


def spec_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...], order: Any
) -> DTensorSpec:
    """On a mesh without process groups."""
    ranks = torch.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)


@pytest.mark.parametrize("size", [0, 1, 7, 12, 13])
def test_a_dim_that_is_sharded_in_another_order(size):
    """``shard_order``: torch's own splits, one after another in that order."""
    mesh_shape = (2, 3, 2)
    whole = torch.arange(size * 3).reshape(size, 3)
    for order in itertools.permutations(range(3)):
        entry = ShardOrderEntry(tensor_dim=0, mesh_dims=order)
        spec = spec_of(tuple(whole.shape), mesh_shape, (Shard(0),) * 3, (entry,))
        for coordinate in coordinates(mesh_shape):
            local = whole
            for mesh_dim in order:
                pieces, _ = Shard(0)._split_tensor(local, mesh_shape[mesh_dim], with_padding=False)
                local = pieces[coordinate[mesh_dim]]
            check(held_ranges(spec, coordinate), whole, local)


def test_another_order_and_the_strided_shards_that_stand_for_it():
    """Where pieces are of one size, torch says that these two are the same."""
    mesh_shape, placements = (2, 3, 2), (Shard(0), Shard(1), Shard(0))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(2, 0)), ShardOrderEntry(tensor_dim=1, mesh_dims=(1,)))
    ordered = spec_of((8, 6), mesh_shape, placements, order)
    strided = spec_of(
        (8, 6),
        mesh_shape,
        DTensorSpec._convert_shard_order_to_StridedShard(order, placements, ordered.mesh),
        None,
    )
    assert isinstance(strided.placements[0], _StridedShard)
    for coordinate in coordinates(mesh_shape):
        assert held_ranges(ordered, coordinate) == held_ranges(strided, coordinate)
    assert held_ranges(ordered, (1, 0, 0)) == (((2, 4),), ((0, 2),))


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ((Shard(0), Shard(0)), (((3 << 48, 4 << 48),), ((0, 3),))),
        ((_StridedShard(0, split_factor=2), Shard(0)), (((3 << 48, 4 << 48),), ((0, 3),))),
        ((Replicate(), _StridedShard(0, split_factor=2)), (((1 << 48, 2 << 48), (3 << 48, 4 << 48)), ((0, 3),))),
    ],
)
def test_a_dim_whose_indices_no_memory_would_hold(placements, expected):
    assert held_ranges(spec_of((1 << 50, 3), (2, 2), placements, None), (1, 1)) == expected
