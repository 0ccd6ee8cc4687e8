"""``_random.py`` in torch's own place, with nothing installed."""

import os
import subprocess
import sys

import pytest
from conftest import IN_TREE, RANDOM_PY

pytestmark = pytest.mark.skipif(IN_TREE, reason="runs the suite that is running")


def run(code):
    tests = os.path.dirname(__file__)
    program = f"import sys; sys.path.insert(0, {tests!r}); import conftest; {code}"
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        env={**os.environ, "TDR_IN_TREE": "1"}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_semantic_tests_pass():
    tests = os.path.dirname(__file__)
    files = [os.path.join(tests, name) for name in ("test_semantics.py", "test_local_tensor.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TDR_IN_TREE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_it_is_the_file_of_this_package_and_needs_nothing_of_it():
    done = run(
        "import torch.distributed.tensor as dtensor, torch.distributed.tensor._random as random; "
        "print(random.__file__, 'torch_dtensor_rng' in sys.modules)"
    )
    assert done.stdout.split() == [str(RANDOM_PY), "False"], done.stderr


def test_torchs_names_are_there():
    done = run(
        "from torch.distributed.tensor._random import is_rng_supported_mesh, manual_seed, OffsetBasedRNGTracker, "
        "_RNGStateTracker, _PhiloxState, _rng_tracker, _resolve_device, _calc_first_shard_size, _calc_shard_info, "
        "_calc_shard_linear_idx; "
        "[getattr(OffsetBasedRNGTracker, name) for name in ('_distribute_region', '_compute_rng_offsets', "
        "'_set_pre_op_offset', '_set_post_op_offset', '_calc_shard_linear_idx', 'distribute_region_enabled')]"
    )
    assert done.returncode == 0, done.stderr


def test_a_sharded_op_is_not_traced_to_the_same_numbers_everywhere():
    """Torch's dispatcher traces the local op alone; here that is refused."""
    done = run(
        "import torch; from worlds import as_rank; from torch.distributed.tensor import Shard, empty; "
        "x = empty(8, 4, device_mesh=as_rank(0, (2,)), placements=[Shard(0)]); "
        "torch.compile(lambda x: x.uniform_(), backend='aot_eager', fullgraph=True)(x)"
    )
    assert "cannot be traced by way of its region" in done.stderr, done.stderr
