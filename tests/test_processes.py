"""Real processes over gloo."""

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, empty
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import each_rank, gloo

import torch_dtensor_rng as tdr


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def only_a_stage_draws(rank):
    """PyTorch issue 157662: the ranks of one pipeline stage draw for the first time, the others go on to a barrier."""
    with tdr.install():
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = world["dp"]
        tdr.manual_seed(0, world, distinct_dims=("pp",))
        before = torch.get_rng_state()
        if world.get_local_rank("pp") == 1:
            empty(8, 4, device_mesh=stage, placements=[Shard(0)]).uniform_()
        dist.barrier()
        drew = not torch.equal(before, torch.get_rng_state())
        x = empty(8, 4, device_mesh=stage, placements=[Shard(0)]).normal_()
        return world.get_coordinate(), drew, digest(x.to_local()), digest(torch.get_rng_state())


def test_ranks_of_a_sub_mesh_draw_while_the_others_go_on():
    results = gloo(4, only_a_stage_draws)
    assert [drew for _, drew, _, _ in results] == [False, False, True, True]
    assert len({values for _, _, values, _ in results}) == 4
    states = [state for _, _, _, state in results]
    assert states[0] == states[1] != states[2] == states[3]


def outside_the_mesh(rank):
    with tdr.install():
        mesh = init_device_mesh("cpu", (4,))
        from torch.distributed.device_mesh import DeviceMesh

        part = DeviceMesh("cpu", [1, 2])
        torch.manual_seed(0)
        before = torch.get_rng_state()
        x = empty(8, 4, device_mesh=part, placements=[Shard(0)])
        y = torch.randn_like(x.uniform_())
        out, mask = torch.native_dropout(y, 0.5, True)
        moved = not torch.equal(before, torch.get_rng_state())
        dist.barrier()
        assert mesh.size() == 4
        return moved, y.shape, y.to_local().numel(), out.to_local().dtype, mask.to_local().dtype


def test_ranks_outside_the_mesh_do_nothing():
    results = gloo(4, outside_the_mesh)
    assert [moved for moved, *_ in results] == [False, True, True, False]
    assert [numel for _, _, numel, *_ in results] == [0, 16, 16, 0]
    assert all(shape == (8, 4) for _, shape, *_ in results)
    assert {dtypes for *_, dtypes in (((o, m),) for *_, o, m in results)} == {(torch.float32, torch.bool)}


def sharded_model(rank):
    with tdr.install():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Linear(32, 12))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        model.to_empty(device="cpu")
        torch.manual_seed(6)
        for layer in model:
            layer.reset_parameters()
        shards = {name: (tuple(map(repr, p.placements)), digest(p.to_local())) for name, p in model.named_parameters()}
        return shards, digest(torch.get_rng_state())


def test_fsdp_and_tensor_parallel():
    results = gloo(4, sharded_model)
    assert len({state for _, state in results}) == 1
    shards = [shards for shards, _ in results]
    assert "_StridedShard(dim=0, sf=2)" in shards[0]["0.weight"][0]
    for name in ("0.weight", "0.bias", "1.weight"):  # sharded on both mesh dims
        assert len({shard[name][1] for shard in shards}) == 4, name
    # A bias of RowwiseParallel is replicated over tp, and sharded over dp by FSDP.
    assert len({shard["1.bias"][1] for shard in shards}) == 2
    assert shards[0]["1.bias"] == shards[1]["1.bias"]


def draw(mesh):
    torch.manual_seed(2)
    x = empty(10, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    return digest(x.normal_().to_local()), digest(torch.nn.functional.dropout(x, 0.5).to_local())


def in_a_process(rank):
    with tdr.install():
        return draw(init_device_mesh("cpu", (2, 2)))


def test_processes_draw_what_played_ranks_draw(installed):
    assert gloo(4, in_a_process) == each_rank((2, 2), lambda rank, mesh: draw(mesh))


def partial_input(rank):
    with tdr.install():
        mesh = init_device_mesh("cpu", (2,))
        from torch.distributed.tensor import DTensor, Partial

        x = DTensor.from_local(torch.full((6, 4), 0.25), mesh, [Partial()], run_check=False)
        torch.manual_seed(1)
        out, mask = torch.native_dropout(x, 0.5, True)
        drawn = torch.bernoulli(x)
        like = torch.rand_like(x)
        assert out.placements == mask.placements == drawn.placements == like.placements == (Replicate(),)
        end = torch.get_rng_state()
        torch.manual_seed(1)
        whole = torch.full((6, 4), 0.5)
        plain = torch.native_dropout(whole, 0.5, True)[0], torch.bernoulli(whole), torch.rand_like(whole)
        assert all(map(torch.equal, (out.to_local(), drawn.to_local(), like.to_local()), plain))
        assert torch.equal(end, torch.get_rng_state())
        return True


def test_a_partial_input_is_reduced_first():
    assert gloo(2, partial_input) == [True, True]


def under_way(rank):
    with tdr.install():
        mesh = init_device_mesh("cpu", (2,))
        x = empty(6, 4, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
        dropped = torch.native_dropout(x.redistribute(placements=[Replicate()], async_op=True), 0.5, True)[0]
        y = x.redistribute(placements=[Replicate()], async_op=True)
        is_under_way = type(y.to_local()) is not torch.Tensor
        torch.manual_seed(1)
        drawn = y.uniform_().to_local()  # an AsyncCollectiveTensor waits before any op on it
        torch.manual_seed(1)
        assert torch.equal(drawn, torch.empty(6, 4).uniform_())
        assert dropped.to_local().unique().tolist() == [0, 2]
        return is_under_way


def test_a_local_tensor_whose_collective_is_still_under_way():
    assert gloo(2, under_way) == [True, True]
