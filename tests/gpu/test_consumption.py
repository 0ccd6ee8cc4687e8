"""What the local call of each row consumes, measured by the generator, against the distance between shards."""

import random

import pytest
import torch
from test_semantics import OPS
from torch.distributed.tensor import Shard, empty
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import as_rank, default_generator

from torch_dtensor_rng import _dispatch, _ops

ROWS = {row.op: row for row in _ops.TABLE}


class RowsThatRun(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ROWS:
            self.rows.append(ROWS[func])
        return func(*args, **(kwargs or {}))


def row_of(name, device):
    with RowsThatRun() as mode:
        OPS[name](torch.empty(4, 4, device=device), None)
    return mode.rows[0] if len(mode.rows) == 1 else None


# bernoulli_tensor_cuda_kernel reserves 10 offsets, rounded up, and reads one counter, which is 4 of them
# (ATen/native/cuda/Distributions.cu).
READS_LESS = {"bernoulli.default": (12, 4)}

SINGLE = [name for name in OPS if row_of(name, "cpu") is not None]


def test_each_row_is_measured():
    attention = {row.overload for row in _ops.TABLE if row.placed is _ops.Placed.TORCH_RULE}
    with_generator = {row.overload for row in _ops.TABLE if row.overload.endswith(("generator", "generator_dtype"))}
    measured = {row_of(name, "cpu").overload for name in SINGLE}
    assert {row.overload for row in _ops.TABLE} - attention - with_generator == measured


@pytest.mark.gpu
@pytest.mark.parametrize("name", SINGLE)
def test_a_shard_has_room_for_what_its_local_call_consumes(name):
    row = row_of(name, "cuda")
    mesh = as_rank(0, (4,), "cuda")
    generator = default_generator("cuda")
    choose = random.Random(name)
    taken = 0
    for _ in range(200):
        dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
        shape = (int(4 ** choose.uniform(0, 6)), int(4 ** choose.uniform(0, 4.5)))
        spec = empty(shape, device_mesh=mesh, placements=[Shard(0)], dtype=dtype)._spec
        layout = _dispatch._layout_of(row, spec)
        local = torch.empty((shape[0] + 3) // 4, shape[1], dtype=dtype, device="cuda")
        generator.manual_seed(0)
        try:
            OPS[name](local, None)
        except (RuntimeError, NotImplementedError):
            assert dtype is not torch.float32, "every row draws float32"
            continue
        reserved, read = READS_LESS.get(row.overload, (generator.get_offset(), generator.get_offset()))
        assert reserved == generator.get_offset()
        taken = max(taken, read)
        assert read <= layout.step, (shape, dtype)
        if shape[0] % 4 == 0:  # the last shard is as large as the first
            assert layout.step * 3 + read <= layout.end, (shape, dtype)
    assert taken > 0
