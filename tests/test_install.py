"""Putting the package into torch and taking it out: torch is left as it was."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor as dtensor
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._dispatch as torch_dispatch
import torch.distributed.tensor._random as torch_random
from torch.distributed.tensor import DTensor, Shard, empty
from worlds import as_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _random

MODULES = (torch, torch.nn.init, torch.compiler.config, dtensor, torch_api, torch_dispatch, torch_random, _random)


def torch_as_it_is():
    """Every attribute of every module that an installation patches, and the dispatcher's own."""
    everything = {
        (module.__name__, name): value
        for module in MODULES
        for name, value in vars(module).items()
        if not name.startswith("__")
    }
    everything["cache_key_tag"] = torch.compiler.config.cache_key_tag
    dispatcher = DTensor._op_dispatcher
    everything["handlers"] = dict(dispatcher._custom_op_handlers)
    everything["dispatcher"] = {
        name: value for name, value in vars(dispatcher).items() if name != "_custom_op_handlers"
    }
    everything["random ops"] = set(dispatcher._random_ops)
    everything["DTensor"] = dict(vars(DTensor))
    return everything


def differences(before, after):
    return {
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name) and before.get(name) != after.get(name)
    }


def test_uninstall_leaves_torch_as_it_was():
    before = torch_as_it_is()
    tdr.install()
    changed = differences(before, torch_as_it_is())
    assert {"handlers", "cache_key_tag", ("torch.nn.init", "_no_grad_trunc_normal_")} <= changed
    assert {("torch.distributed.tensor", "rand"), ("torch.distributed.tensor._random", "_rng_tracker")} <= changed
    tdr.uninstall()
    assert not differences(before, torch_as_it_is())


def test_a_with_block_and_an_exception():
    before = torch_as_it_is()
    with pytest.raises(ZeroDivisionError), tdr.install() as handle:
        assert handle.policy == "offset"
        raise ZeroDivisionError
    assert not differences(before, torch_as_it_is())
    handle.uninstall()  # is out already


def test_nesting():
    before = torch_as_it_is()
    with tdr.install():
        outer = torch_as_it_is()
        with tdr.install():
            assert torch_random._rng_tracker is not None
        assert not differences(outer, torch_as_it_is())
        inner = tdr.install()
        inner.uninstall()
        inner.uninstall()
        assert not differences(outer, torch_as_it_is())
    assert not differences(before, torch_as_it_is())


def test_install_again():
    mesh = as_rank(1, (4,))
    draws = []
    for _ in range(2):
        with tdr.install():
            torch.manual_seed(0)
            draws.append(empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_().to_local().clone())
    assert torch.equal(*draws)


def test_an_installation_that_fails_midway_is_taken_back(monkeypatch):
    before = torch_as_it_is()

    def fail():
        raise RuntimeError("no tracker")

    monkeypatch.setattr("torch_dtensor_rng._install._AnyDeviceTracker", fail)
    with pytest.raises(RuntimeError, match="no tracker"):
        tdr.install()
    assert not differences(before, torch_as_it_is())
    with pytest.raises(RuntimeError, match="not installed"):
        tdr.uninstall()


def test_installing_before_and_after_the_process_group_and_the_tensor():
    def draw(mesh, x):
        torch.manual_seed(0)
        return x.uniform_().to_local().clone()

    handle = tdr.install()
    mesh = as_rank(1, (4,))
    before = draw(mesh, empty(16, 6, device_mesh=mesh, placements=[Shard(0)]))
    handle.uninstall()
    mesh = as_rank(1, (4,))
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
    x.uniform_()  # torch's own path first
    with tdr.install():
        assert torch.equal(before, draw(mesh, x))


def test_torchs_tracker_module_while_installed():
    """What torchtitan and others reach for."""
    mesh = as_rank(1, (4,))
    with tdr.install():
        assert isinstance(torch_random._rng_tracker, torch_random.OffsetBasedRNGTracker)
        assert torch_random.OffsetBasedRNGTracker is _random.OffsetBasedRNGTracker
        assert torch_random._rng_tracker.distribute_region_enabled
        assert torch_random.is_rng_supported_mesh(mesh) and torch_dispatch.is_rng_supported_mesh(mesh)
        torch_random.manual_seed(7, mesh)
        drawn = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_().to_local().clone()
        torch.manual_seed(7)
        torch_random._rng_tracker = torch_random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        again = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_().to_local()
        assert torch.equal(drawn, again)


def test_no_warning_on_a_cpu_mesh(recwarn):
    mesh = as_rank(1, (4,))
    with tdr.install():
        empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_()
        torch_random.manual_seed(7, mesh)
        dtensor.rand(4, device_mesh=mesh)
    assert not [warning for warning in recwarn if "DTensor" in str(warning.message)]


def test_importing_draws_nothing_and_compiles_nothing():
    """The import and the installation leave the generator alone, and do not import the compiler."""
    code = (
        "import sys, torch; before = torch.get_rng_state(); import torch_dtensor_rng as tdr; tdr.install(); "
        "assert torch.equal(before, torch.get_rng_state()); assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
