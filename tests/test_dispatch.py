"""What the quick path remembers of a spec."""

import torch
from torch.distributed.tensor import DTensor, Shard, empty
from torch.distributed.tensor._dtensor_spec import TensorMeta
from worlds import as_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _dispatch


def test_a_spec_that_changes_is_looked_at_again():
    """DTensorSpec is mutable: its hash follows its tensor_meta and placements."""
    mesh = as_rank(2, (4,))
    with tdr.install():
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_()
        spec = x._spec
        before = _dispatch._known[id(spec)].plan
        spec.tensor_meta = TensorMeta(torch.Size((32, 6)), (6, 1), torch.float32)
        DTensor(torch.empty(8, 6), spec, requires_grad=False).uniform_()
        after = _dispatch._known[id(spec)].plan
        assert (before.start, before.end, after.start, after.end) == (48, 96, 96, 192)
        spec.placements = (Shard(1),)
        DTensor(torch.empty(32, 2), spec, requires_grad=False).uniform_()
        assert _dispatch._known[id(spec)].plan.start == 128


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(_dispatch, "_KNOWN_SPECS", 3)
    monkeypatch.setattr(_dispatch, "_KNOWN_OUTPUTS", 3)
    mesh = as_rank(0, (4,))
    with tdr.install():
        kept = [empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_() for _ in range(8)]
        assert 0 < len(_dispatch._known) <= 3
        x = kept[-1]
        for p in range(8):
            torch.native_dropout(x, p / 10, True)
        assert 0 < len(_dispatch._known[id(x._spec)].outputs) <= 3
    assert not _dispatch._known


def test_kinds_of_outputs():
    mesh = as_rank(1, (4,))
    with tdr.install():
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)]).uniform_()
        for _ in range(2):  # the first time, and from what is remembered
            assert torch.rand_like(x, dtype=torch.float64).dtype == torch.float64
            assert torch.rand_like(x).dtype == torch.float32
            assert torch.randint_like(x, 5, dtype=torch.int32).to_local().dtype == torch.int32
            out, mask = torch.native_dropout(x, 0.5, True)
            assert (out.dtype, mask.dtype) == (torch.float32, torch.bool)
            t = torch.rand_like(x.t())
            assert t.stride() == (1, 6) and t.to_local().stride() == (1, 6) and t.placements == (Shard(1),)
            contiguous = torch.rand_like(x.t(), memory_format=torch.contiguous_format)
            assert contiguous.stride() == (16, 1) and contiguous.to_local().is_contiguous()
