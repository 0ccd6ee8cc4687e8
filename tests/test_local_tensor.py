"""LocalTensorMode, torch's simulation of many ranks in one process."""

import pytest
import torch
import torch.distributed as dist
from conftest import IN_TREE
from test_semantics import NAMES, OPS, takes_generator
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
from torch.testing._internal.distributed.fake_pg import FakeStore
from worlds import each_rank

PLACEMENTS = [Shard(0), Replicate()]


@pytest.fixture
def mode(device, installed):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    if device == "cuda":
        torch.cuda.init()
    with LocalTensorMode(4) as mode:
        yield mode


def rank_states(mode, device):
    """The state of the device's generator on each simulated rank."""
    return [
        bytes((cpu if device == "cpu" else others[0]).numpy())
        for cpu, others in (mode._per_rank_rng_states[r] for r in range(4))
    ]


def shards(x):
    return [x._local_tensor._local_tensors[rank].clone() for rank in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_shards_replicas_and_states(name, device, mode):
    op = OPS[name]
    mesh = init_device_mesh(device, (2, 2))
    x = empty(16, 6, device_mesh=mesh, placements=PLACEMENTS)
    torch.manual_seed(3)
    seeded = rank_states(mode, device)
    first = shards(op(x, None))
    after = rank_states(mode, device)
    assert torch.equal(first[0], first[1]) and torch.equal(first[2], first[3]), "replicas agree"
    assert not torch.equal(first[0], first[2]), "shards differ"
    assert len(set(after)) == 1 and after != seeded, "the ranks advance in step"
    second = shards(op(x, None))
    assert not torch.equal(first[0], second[0])
    if takes_generator(name):
        before = rank_states(mode, device)
        generator = torch.Generator(device).manual_seed(3)
        assert all(map(torch.equal, shards(op(x, generator)), first)), "a passed generator gives the default's values"
        assert bytes(generator.get_state().numpy()) == after[0], "and advances like it"
        assert rank_states(mode, device) == before, "and the default ones are left alone"


@pytest.mark.parametrize("name", ["uniform_", "randn_like", "native_dropout"])
def test_the_same_numbers_as_rank_by_rank(name, device, installed):
    def draw(mesh):
        torch.manual_seed(3)
        return OPS[name](empty(16, 6, device_mesh=mesh, placements=PLACEMENTS), None)

    one_by_one = each_rank((2, 2), lambda rank, mesh: draw(mesh).to_local().clone(), device)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with LocalTensorMode(4):
        together = shards(draw(init_device_mesh(device, (2, 2))))
    assert all(map(torch.equal, one_by_one, together))


def test_an_exception_leaves_every_rank_where_it_was(device, mode):
    x = empty(16, 6, device_mesh=init_device_mesh(device, (2, 2)), placements=PLACEMENTS)
    torch.manual_seed(3)
    generator = torch.Generator(device).manual_seed(3)
    before, theirs = rank_states(mode, device), generator.get_state()
    ours = torch.get_rng_state()
    for passed in (None, generator):
        with pytest.raises(RuntimeError, match="uniform_ expects to return a"):
            x.uniform_(2.0, 1.0, generator=passed)
        assert rank_states(mode, device) == before
        assert torch.equal(generator.get_state(), theirs)
        assert torch.equal(torch.get_rng_state(), ours)


@pytest.mark.skipif(IN_TREE, reason="needs the installation")
def test_trunc_normal_and_the_factories(device, mode):
    import torch_dtensor_rng as tdr

    mesh = init_device_mesh(device, (2, 2))
    torch.manual_seed(3)
    x = torch.nn.init.trunc_normal_(empty(64, 6, device_mesh=mesh, placements=PLACEMENTS), a=-1.0, b=1.0)
    assert all(bool((shard.abs() <= 1).all()) for shard in shards(x))
    assert len(set(rank_states(mode, device))) == 1
    drawn = shards(tdr.rand(16, 6, device_mesh=mesh, placements=PLACEMENTS))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert len(set(rank_states(mode, device))) == 1


@pytest.mark.skipif(IN_TREE, reason="needs the installation")
def test_another_seed_along_a_distinct_dim(device, mode):
    import torch_dtensor_rng as tdr

    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
    tdr.manual_seed(8, mesh, distinct_dims=("pp",))
    states = rank_states(mode, device)
    assert states[0] == states[1] != states[2] == states[3]


def test_an_exception_restores_nothing_later(device, mode):
    """What was entered is left at once, and not when the traceback is collected."""
    import gc

    x = empty(16, 6, device_mesh=init_device_mesh(device, (2, 2)), placements=PLACEMENTS)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="uniform_ expects to return a") as raised:
        x.uniform_(2.0, 1.0)
    torch.manual_seed(4)
    seeded, ours = rank_states(mode, device), torch.get_rng_state()
    del raised
    gc.collect()
    assert rank_states(mode, device) == seeded
    assert torch.equal(torch.get_rng_state(), ours)
