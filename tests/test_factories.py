"""Factories of random DTensors."""

import threading

import pytest
import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor import Replicate, Shard, empty
from worlds import as_rank, default_generator, each_rank

import torch_dtensor_rng as tdr

# factory -> the in-place op on an empty DTensor that it must equal
FACTORIES = {
    "rand": (lambda size, **kw: tdr.rand(*size, **kw), lambda x: x.uniform_(), torch.float32),
    "randn": (lambda size, **kw: tdr.randn(size, **kw), lambda x: x.normal_(), torch.float32),
    "randint": (lambda size, **kw: tdr.randint(3, 50, size, **kw), lambda x: x.random_(3, 50), torch.int64),
    "normal": (lambda size, **kw: tdr.normal(2.0, 3.0, size, **kw), lambda x: x.normal_(2.0, 3.0), torch.float32),
    "bernoulli": (lambda size, **kw: tdr.bernoulli(0.3, size, **kw), lambda x: x.bernoulli_(0.3), torch.float32),
    "torch's rand": (lambda size, **kw: dtensor.rand(*size, **kw), lambda x: x.uniform_(), torch.float32),
    "torch's randn": (lambda size, **kw: dtensor.randn(torch.Size(size), **kw), lambda x: x.normal_(), torch.float32),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_is_the_op_on_an_empty_tensor(name, device, installed):
    factory, fill, dtype = FACTORIES[name]

    def on_rank(rank, mesh):
        where = {"device_mesh": mesh, "placements": [Shard(0), Replicate()]}
        torch.manual_seed(3)
        made = factory((10, 6), **where)
        end = default_generator(device).get_state()
        assert made.dtype == dtype and made.shape == (10, 6) and made.placements == (Shard(0), Replicate())
        torch.manual_seed(3)
        expected = fill(empty(10, 6, dtype=dtype, **where)).to_local()
        assert torch.equal(made.to_local(), expected)
        assert torch.equal(end, default_generator(device).get_state())
        generator = torch.Generator(device).manual_seed(3)
        torch.manual_seed(9)
        before = default_generator(device).get_state()
        assert torch.equal(factory((10, 6), generator=generator, **where).to_local(), expected)
        assert torch.equal(generator.get_state(), end)
        assert torch.equal(default_generator(device).get_state(), before)
        return made.to_local().clone()

    shards = each_rank((3, 2), on_rank, device)
    assert torch.equal(shards[0], shards[1]) and not torch.equal(shards[0], shards[2])


@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]])
@pytest.mark.parametrize("n", [0, 1, 5, 23])
def test_randperm_is_the_permutation_of_one_device(n, placements, device, installed):
    def on_rank(rank, mesh):
        default = default_generator(device)
        for generator in (None, torch.Generator(device)):
            live = default if generator is None else generator
            live.manual_seed(3)
            made = tdr.randperm(n, dtype=torch.int32, device_mesh=mesh, placements=placements, generator=generator)
            end = live.get_state()
            assert made.dtype == torch.int32 and made.shape == (n,) and made.placements == tuple(placements)
            live.manual_seed(3)
            plain = torch.randperm(n, dtype=torch.int32, device=device, generator=generator)
            assert torch.equal(end, live.get_state())
        return made.to_local(), plain

    shards = each_rank((2, 3), on_rank, device)
    distinct = {Shard(0): shards, Replicate(): shards[:3]}[placements[0]]
    distinct = distinct if placements[1] == Shard(0) else distinct[:1]
    assert torch.equal(torch.cat([shard for shard, _ in distinct]), shards[0][1])


def test_dtype_requires_grad_and_default_placements(device, installed):
    def on_rank(rank, mesh):
        made = tdr.rand(4, 6, device_mesh=mesh, dtype=torch.float64, requires_grad=True)
        assert made.dtype == torch.float64 and made.requires_grad and made.is_leaf
        assert made.placements == (Replicate(),)
        with mesh:
            assert tdr.randn(4).device_mesh == mesh
        assert tdr.randint(5, (8,), device_mesh=mesh, dtype=torch.int32).to_local().max() < 5
        assert tdr.randint(low=4, high=5, size=(8,), device_mesh=mesh).to_local().eq(4).all()
        assert tdr.randint(5, size=(8,), device_mesh=mesh).dtype == torch.int64
        assert tdr.randint(high=5, size=(8,), device_mesh=mesh).to_local().max() < 5
        complex_ = tdr.randn(16, 3, dtype=torch.complex64, device_mesh=mesh, placements=[Shard(0)])
        assert complex_.to_local().imag.ne(0).any()

    each_rank((4,), on_rank, device)


def test_without_an_installation(device):
    def on_rank(rank, mesh):
        torch.manual_seed(3)
        return tdr.rand(16, 4, device_mesh=mesh, placements=[Shard(0)]).to_local().clone()

    bare = each_rank((4,), on_rank, device)
    with tdr.install():
        installed = each_rank((4,), on_rank, device)
    assert all(map(torch.equal, bare, installed))
    assert not torch.equal(bare[0], bare[1])


@pytest.mark.parametrize(
    "surroundings", [lambda: torch.device("meta"), torch.inference_mode], ids=["meta", "inference"]
)
def test_the_first_draw_of_a_thread_by_a_factory(surroundings, installed):
    """A factory draws outside of torch's dispatch, where a default device is still in force."""
    mesh = as_rank(1, (4,))
    drawn = []

    def draw():
        torch.manual_seed(3)
        drawn.append(tdr.rand(16, 4, device_mesh=mesh, placements=[Shard(0)]).to_local().clone())

    def first_and_later():
        with surroundings():
            draw()
        draw()

    thread = threading.Thread(target=first_and_later)
    thread.start()
    thread.join()
    assert len(drawn) == 2 and torch.equal(*drawn)


def test_randperm_that_cannot_require_gradients_draws_nothing(installed):
    mesh = as_rank(1, (4,))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="can require gradients"):
        tdr.randperm(8, requires_grad=True, device_mesh=mesh)
    assert torch.equal(before, torch.get_rng_state())
    made = tdr.randperm(8, dtype=torch.float32, requires_grad=True, device_mesh=mesh, placements=[Shard(0)])
    assert made.requires_grad and made.is_leaf
