"""``nn.init.trunc_normal_``: every rank draws the same number of rounds."""

import hashlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
from worlds import default_generator, each_rank, gloo

import torch_dtensor_rng as tdr

# mean, std, a, b: few rejections; the tail, where most are rejected; a narrow window, drawn from the uniform.
BOUNDS = [(0.0, 1.0, -2.0, 2.0), (0.0, 1.0, 1.5, 6.0), (0.0, 1.0, -0.1, 0.1)]


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def on_rank(rank, mesh_shape, placements, passed):
    mesh = init_device_mesh("cpu", mesh_shape)
    found = []
    with tdr.install():
        for mean, std, a, b in BOUNDS:
            torch.manual_seed(11)
            generator = torch.Generator().manual_seed(11) if passed else None
            x = empty(50, 12, device_mesh=mesh, placements=placements)
            torch.nn.init.trunc_normal_(x, mean, std, a, b, generator=generator)
            local = x.to_local()
            in_bounds = local.numel() == 0 or bool((local >= a).all() & (local <= b).all())
            state = torch.get_rng_state() if generator is None else generator.get_state()
            found.append((in_bounds, digest(state), digest(local)))
    return found


@pytest.mark.parametrize("passed", [False, True], ids=["default", "generator="])
def test_ranks_stay_in_step(passed):
    ranks = gloo(4, on_rank, (2, 2), [Shard(0), Shard(1)], passed)
    for drawn in zip(*ranks):
        assert all(in_bounds for in_bounds, _, _ in drawn)
        assert len({state for _, state, _ in drawn}) == 1, "the ranks drew different numbers of rounds"
        assert len({values for _, _, values in drawn}) == 4


def test_replicas_and_empty_shards():
    ranks = gloo(3, on_rank, (3,), [Shard(1)], False)
    assert len({rank[0][1] for rank in ranks}) == 1
    ranks = gloo(2, on_rank, (2,), [Replicate()], False)
    assert ranks[0] == ranks[1]


def test_replicated_equals_plain(device, installed):
    def one(rank, mesh):
        for mean, std, a, b in BOUNDS:
            torch.manual_seed(4)
            x = torch.nn.init.trunc_normal_(empty(50, 12, device_mesh=mesh), mean, std, a, b)
            if device == "cpu":
                end = default_generator(device).get_state()
            torch.manual_seed(4)
            plain = torch.nn.init.trunc_normal_(torch.empty(50, 12, device=device), mean, std, a, b)
            if device == "cpu":
                assert torch.equal(x.to_local(), plain)
                assert torch.equal(end, default_generator(device).get_state())

    each_rank((1,), one, device)


def test_plain_tensors_are_left_alone():
    def draw():
        return torch.nn.init.trunc_normal_(torch.empty(50, 12), generator=torch.Generator().manual_seed(1))

    plain = draw()
    with tdr.install():
        assert torch.equal(draw(), plain)
