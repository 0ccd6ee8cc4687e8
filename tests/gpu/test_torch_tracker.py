"""On a CUDA device: the values and the end offsets of torch's own tracker, in the same run."""

import math

import pytest
import torch
import torch.distributed.tensor._random as torch_random
from conftest import IN_TREE
from test_semantics import OPS, takes_generator
from torch.distributed.tensor import Replicate, Shard, empty
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import as_rank, default_generator, each_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IN_TREE, reason="compares with torch's own file")]

TORCHS_OPS = ["uniform_", "normal_", "bernoulli_", "bernoulli", "native_dropout", "rand_like", "randn_like"]
TORCHS_OPS += ["randint_like", "randint_like_low"]

# mesh shape, placements, global shape; torch's own places keep shards and ops apart in these.
APART = {
    "even": ((4,), [Shard(0)], (16, 6)),
    "even, large": ((4,), [Shard(0)], (4096, 1024)),
    "columns": ((4,), [Shard(1)], (30, 1024)),
    "uneven": ((4,), [Shard(0)], (10, 6)),
    "uneven, large": ((8,), [Shard(0)], (1001, 333)),
    "uneven columns": ((3,), [Shard(1)], (30, 1000)),
    "with empty shards": ((8,), [Shard(0)], (5, 8)),
    "two dims": ((2, 4), [Shard(0), Shard(1)], (64, 128)),
    "two dims, uneven": ((2, 4), [Shard(0), Shard(1)], (1001, 333)),
    "replicas": ((2, 2), [Replicate(), Shard(0)], (64, 128)),
    "replicated": ((2, 2), [Replicate(), Replicate()], (64, 128)),
    "three mesh dims": ((2, 2, 2), [Shard(1), Replicate(), Shard(0)], (64, 128)),
}
# Torch's last shards draw past its end offset, where the next op begins.
PAST_THE_END = {
    "one dim twice": ((2, 2), [Shard(0), Shard(0)], (64, 128)),
    "one dim twice, uneven": ((2, 2), [Shard(0), Shard(0)], (50, 128)),
    "one dim three times": ((2, 2, 2), [Shard(0), Shard(0), Shard(0)], (64, 128)),
    "FSDP2 x TP": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (64, 128)),
}


def two_draws(op, shape, placements, generator):
    """Two ops in a row on this rank: the values of each, and the offset after each."""

    def on_rank(rank, mesh):
        torch.manual_seed(99)
        passed = torch.Generator("cuda").manual_seed(99) if generator else None
        source = passed or default_generator("cuda")
        drawn, ends = [], []
        for _ in range(2):
            x = empty(shape, device_mesh=mesh, placements=placements)
            drawn.append(op(x, passed).to_local().clone())
            ends.append(source.get_offset())
        return drawn, ends

    return on_rank


def ours_and_torchs(name, case, generator):
    import torch_dtensor_rng as tdr

    if generator and not takes_generator(name):
        pytest.skip("takes no generator")
    mesh_shape, placements, shape = case
    torch_random._rng_tracker = None  # torch's own is made at its first op
    # rand_like(generator=) and its kin have no sharding rule in torch: theirs is what the default generator draws.
    theirs_too = generator and name in ("uniform_", "normal_", "bernoulli_", "bernoulli")
    theirs = each_rank(mesh_shape, two_draws(OPS[name], shape, placements, theirs_too), "cuda")
    with tdr.install():
        ours = each_rank(mesh_shape, two_draws(OPS[name], shape, placements, generator), "cuda")
    return ours, theirs


@pytest.mark.parametrize("generator", [False, True], ids=["default", "generator="])
@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("name", TORCHS_OPS)
def test_values_and_end_offsets_are_torchs(name, case, generator):
    ours, theirs = ours_and_torchs(name, APART[case], generator)
    for (drawn, ends), (their_drawn, their_ends) in zip(ours, theirs):
        assert ends == their_ends
        assert all(map(torch.equal, drawn, their_drawn))


@pytest.mark.parametrize("generator", [False, True], ids=["default", "generator="])
@pytest.mark.parametrize("case", PAST_THE_END)
@pytest.mark.parametrize("name", TORCHS_OPS)
def test_end_offsets_are_torchs_where_its_ops_overlap(name, case, generator):
    ours, theirs = ours_and_torchs(name, PAST_THE_END[case], generator)
    assert [ends for _, ends in ours] == [ends for _, ends in theirs]
    assert all(map(torch.equal, ours[0][0], theirs[0][0])), "the first shard starts where torch's does"
    assert not torch.equal(ours[-1][0][0], theirs[-1][0][0])


@pytest.mark.parametrize("case", PAST_THE_END)
def test_torchs_own_ops_in_a_row_share_numbers(case):
    """Why a dim that is sharded repeatedly does not draw torch's values: shards of its second op are those of its
    first."""
    ours, theirs = ours_and_torchs("uniform_", PAST_THE_END[case], False)

    def shared(ranks):
        first, second = ({v for drawn, _ in ranks for v in drawn[i].flatten().tolist()} for i in range(2))
        return len(first & second) / len(first)

    assert shared(theirs) > 0.2
    assert shared(ours) < 0.01


def test_torchs_own_small_shards_share_numbers():
    case = ((8,), [Shard(0)], (8,))
    ours, theirs = ours_and_torchs("uniform_", case, False)
    assert len({drawn[0].item() for drawn, _ in theirs}) < 8
    assert len({drawn[i].item() for drawn, _ in ours for i in range(2)}) == 16


def stock_consumption(draw):
    default = default_generator("cuda")
    default.set_offset(0)
    draw()
    return default.get_offset()


@pytest.mark.parametrize("name", TORCHS_OPS)
def test_a_local_op_consumes_at_most_what_is_reserved(name):
    from torch_dtensor_rng import _random

    generator = torch.Generator().manual_seed(0)
    sizes = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 256, 257, 1024, 270336, 270337, 1081344, 1081345, 3_000_000]
    sizes += torch.randint(1, 2_000_000, (20,), generator=generator).tolist()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in sizes:
            x = torch.ones(size, device="cuda", dtype=dtype)
            consumed = stock_consumption(lambda: OPS[name](x, None))  # noqa: B023
            if name == "bernoulli":
                # It advances by 10, rounded up, and each thread makes one call, of 4 (bernoulli_tensor_cuda_kernel in
                # ATen/native/cuda/DistributionBernoulli.cu).
                assert consumed == 12
                continue
            assert 0 < consumed <= _random._philox_consumption(size), (dtype, size, consumed)


def test_a_tensor_past_two_to_the_31_bytes_consumes_at_most_what_is_reserved():
    from torch_dtensor_rng import _random

    for dtype in (torch.float32, torch.float64):
        x = torch.empty((1 << 29) + (1 << 27) + 12345, device="cuda", dtype=dtype)
        assert stock_consumption(x.uniform_) <= _random._philox_consumption(x.numel())
        del x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["uniform_", "normal_", "native_dropout", "bernoulli", "randint_like"])
def test_no_two_shards_nor_two_ops_share_numbers(name, dtype, installed):
    """Over shardings of every awkward kind, by the numbers themselves."""
    for mesh_shape, placements, shape in (
        ((8,), [Shard(0)], (8, 16)),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (32, 16)),
        ((4, 4), [Shard(0), Shard(1)], (17, 33)),
        ((2, 2, 2), [Shard(0), Shard(0), Shard(0)], (64, 16)),
        ((4,), [Shard(0)], (4, 64)),
    ):

        def on_rank(rank, mesh):
            torch.manual_seed(99)
            outs = []
            for _ in range(3):
                x = empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)  # noqa: B023
                outs.append(OPS[name](x, None).to_local().flatten().tolist())
            return outs

        drawn = [tuple(values) for outs in each_rank(mesh_shape, on_rank, "cuda") for values in outs]
        drawn = [values for values in drawn if len(values) >= (48 if name in ("native_dropout", "bernoulli") else 16)]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("name", ["uniform_", "randn_like", "native_dropout", "bernoulli"])
def test_an_offloaded_shard_draws_from_the_cpu_generator(name, installed):
    """PyTorch issue 180088: a parameter on the CPU, its mesh on CUDA."""

    def on_rank(rank, mesh):
        x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
        x = torch.empty_like(x, device="cpu")
        assert not x.to_local().is_cuda
        torch.manual_seed(1)
        gpu = default_generator("cuda").get_offset()
        first = OPS[name](x, None).to_local().clone()
        second = OPS[name](x, None).to_local().clone()
        assert not first.is_cuda and not torch.equal(first, second)
        assert default_generator("cuda").get_offset() == gpu
        if takes_generator(name):
            generator = torch.Generator().manual_seed(1)
            assert torch.equal(OPS[name](x, generator).to_local(), first)
            with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
                OPS[name](x, torch.Generator("cuda"))
        return first, torch.get_rng_state()

    ranks = each_rank((4,), on_rank, "cuda")
    assert len({tuple(values.flatten().tolist()) for values, _ in ranks}) == 4
    assert all(torch.equal(state, ranks[0][1]) for _, state in ranks)


def test_an_offloaded_trunc_normal_returns(installed):
    mesh = as_rank(0, (1,), "cuda")
    x = torch.empty_like(empty(64, 32, device_mesh=mesh, placements=[Shard(0)]), device="cpu")
    torch.nn.init.trunc_normal_(x, a=-1.0, b=1.0)
    assert bool((x.to_local().abs() <= 1).all())


def test_like_on_another_device(installed):
    mesh = as_rank(1, (4,), "cuda")
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
    x.uniform_()
    torch.manual_seed(1)
    drawn = torch.randn_like(x, device="cpu").to_local()
    torch.manual_seed(1)
    same = torch.randn_like(torch.empty_like(x, device="cpu")).to_local()
    assert not drawn.is_cuda and torch.equal(drawn, same)


def test_no_state_tensor_is_read_or_written(installed, monkeypatch):
    mesh = as_rank(1, (4,), "cuda")
    x = empty(16, 6, device_mesh=mesh, placements=[Shard(0)])
    generator = torch.Generator("cuda").manual_seed(1)

    def forbidden(*args, **kwargs):
        raise AssertionError("a state tensor")

    for module, name in ((torch.cuda, "get_rng_state"), (torch.cuda, "set_rng_state"), (torch.random, "fork_rng")):
        monkeypatch.setattr(module, name, forbidden)
    for passed in (None, generator):
        x.uniform_(generator=passed)
        torch.native_dropout(x, 0.5, True)
        torch.randn_like(x)
    assert math.isfinite(float(x.to_local().sum()))
