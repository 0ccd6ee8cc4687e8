"""Fixtures, and the mode in which the tests run on ``_random.py`` in torch's own place, with nothing installed."""

import importlib.abc
import importlib.util
import os
import pathlib
import sys

# "1": _random.py is loaded as torch's module; "copied": it has been copied over torch's file.
IN_TREE = os.environ.get("TDR_IN_TREE") in ("1", "copied")
RANDOM_PY = pathlib.Path(__file__).parents[1] / "torch_dtensor_rng" / "_random.py"


class _InTorchsPlace(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.tensor._random":
            return importlib.util.spec_from_file_location(name, RANDOM_PY)
        return None


if os.environ.get("TDR_IN_TREE") == "1":
    sys.meta_path.insert(0, _InTorchsPlace())

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def pytest_collection_modifyitems(items):
    # "2/8" keeps every eighth test, from the third on: for several processes on one device.
    part, _, parts = os.environ.get("TDR_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_process_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def installed():
    """The package installed; in torch's own place there is nothing to install."""
    if IN_TREE:
        import torch.distributed.tensor._random as torch_random

        torch_random._rng_tracker = None
        yield None
        torch_random._rng_tracker = None
        return
    import torch_dtensor_rng as tdr

    with tdr.install() as handle:
        yield handle


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
