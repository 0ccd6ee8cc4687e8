"""Seeding."""

import pytest
import torch
import torch.distributed.tensor._random as torch_random
from torch.distributed.device_mesh import DeviceMesh
from worlds import as_rank, coordinates

import torch_dtensor_rng as tdr


def seeds(mesh_shape, names, seed, distinct_dims):
    found = {}
    for rank, coordinate in enumerate(coordinates(mesh_shape)):
        mesh = as_rank(rank, mesh_shape, names=names)
        tdr.manual_seed(seed, mesh, distinct_dims=distinct_dims)
        found[coordinate] = torch.initial_seed()
    return found


def test_the_same_seed_on_every_rank():
    tdr.manual_seed(17)
    state = torch.get_rng_state()
    torch.manual_seed(17)
    assert torch.equal(state, torch.get_rng_state())
    assert set(seeds((2, 2), ("dp", "tp"), 17, ()).values()) == {17}


def test_another_seed_along_the_distinct_dims():
    found = seeds((2, 3, 2), ("pp", "dp", "tp"), 100, ("pp",))
    assert all(seed == 100 + pp for (pp, _, _), seed in found.items())
    found = seeds((2, 3, 2), ("pp", "dp", "tp"), 100, ("pp", "tp"))
    assert all(seed == 100 + pp * 2 + tp for (pp, _, tp), seed in found.items())
    found = seeds((2, 3, 2), ("pp", "dp", "tp"), 100, ("tp", "dp"))
    assert all(seed == 100 + tp * 3 + dp for (_, dp, tp), seed in found.items())
    assert seeds((2, 2), ("pp", "dp"), 5, "pp") == seeds((2, 2), ("pp", "dp"), 5, ("pp",))


def test_the_seed_wraps_around():
    top = (1 << 64) - 1
    assert seeds((2,), ("pp",), top, ("pp",)) == {(0,): top, (1,): 0}


@pytest.mark.parametrize("package", [torch_random, None], ids=["installed", "own file"])
def test_torchs_manual_seed_on_a_cpu_mesh(package, installed):
    from torch_dtensor_rng import _random

    module = package or _random
    mesh = as_rank(0, (2,))
    module.manual_seed(23, mesh)
    assert torch.initial_seed() == 23
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="manual_seed requires the current rank to be a part of the device mesh"):
        module.manual_seed(24, DeviceMesh("cpu", [1]))
    assert torch.equal(before, torch.get_rng_state())
