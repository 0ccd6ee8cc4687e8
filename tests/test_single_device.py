"""Policy single_device: every shard is the slice of what the plain op draws on one device, and ends where it ends."""

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_disjoint import Sharding, shardings
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as dtensor_empty
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import as_rank, default_generator, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _single_device

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8)

# name -> (op(x, generator), dtypes); the same call draws on a plain tensor and on a DTensor.
EXACT: dict[str, tuple[Any, tuple[torch.dtype, ...]]] = {
    "uniform_": (lambda x, g: x.uniform_(-0.3, 0.7, generator=g), FLOATS),
    "normal_": (lambda x, g: x.normal_(0.1, 0.02, generator=g), (*FLOATS, torch.complex64)),
    "log_normal_": (lambda x, g: x.log_normal_(0.1, 0.5, generator=g), FLOATS),
    "exponential_": (lambda x, g: x.exponential_(1.5, generator=g), FLOATS),
    "cauchy_": (lambda x, g: x.cauchy_(1.0, 2.0, generator=g), FLOATS),
    "geometric_": (lambda x, g: x.geometric_(0.3, generator=g), (*FLOATS, *INTS)),
    "bernoulli_": (lambda x, g: x.bernoulli_(0.3, generator=g), (*FLOATS, *INTS, torch.bool)),
    "random_": (lambda x, g: x.random_(generator=g), (*FLOATS, *INTS, torch.bool)),
    "random_to": (lambda x, g: x.random_(100, generator=g), (*FLOATS, *INTS)),
    "random_to_wide": (lambda x, g: x.random_(1 << 28, generator=g), (torch.int64, torch.int32)),
    "random_from_to": (lambda x, g: x.random_(3, 100, generator=g), (*FLOATS, *INTS)),
    "random_from_to_narrow": (lambda x, g: x.random_(5, (1 << 28) + 4, generator=g), (torch.int64, torch.int32)),
    "random_from_to_wide": (lambda x, g: x.random_(-5, 1 << 40, generator=g), (torch.int64,)),
    "random_from": (lambda x, g: x.random_(3, None, generator=g), (*FLOATS, *INTS)),
    "random_from_all": (lambda x, g: x.random_(-(1 << 63), None, generator=g), (torch.int64,)),
    "uniform": (lambda x, g: aten.uniform.default(x, -0.3, 0.7, generator=g), FLOATS),
    "normal_functional": (lambda x, g: aten.normal_functional.default(x, 0.1, 0.02, generator=g), FLOATS),
    "log_normal": (lambda x, g: aten.log_normal.default(x, generator=g), FLOATS),
    "exponential": (lambda x, g: aten.exponential.default(x, generator=g), FLOATS),
    "cauchy": (lambda x, g: aten.cauchy.default(x, generator=g), FLOATS),
    "geometric": (lambda x, g: aten.geometric.default(x, 0.3, generator=g), FLOATS),
    "random": (lambda x, g: aten.random.default(x, generator=g), FLOATS),
    "random.to": (lambda x, g: aten.random.to(x, 100, generator=g), FLOATS),
    "random.from": (lambda x, g: getattr(aten.random, "from")(x, 3, 100, generator=g), FLOATS),
    "rand_like": (lambda x, g: torch.rand_like(x, **given_generator(g)), FLOATS),
    "rand_like_float64": (lambda x, g: torch.rand_like(x, dtype=torch.float64, **given_generator(g)), FLOATS),
    "randn_like": (lambda x, g: torch.randn_like(x, **given_generator(g)), FLOATS),
    "randn_like_contiguous": (
        lambda x, g: torch.randn_like(x, memory_format=torch.contiguous_format, **given_generator(g)),
        FLOATS,
    ),
    "randint_like": (lambda x, g: torch.randint_like(x, 100, **given_generator(g)), (*FLOATS, *INTS)),
    "randint_like_low": (lambda x, g: torch.randint_like(x, 3, 100, **given_generator(g)), (*FLOATS, *INTS)),
    "randint_like_wide": (
        lambda x, g: torch.randint_like(x, 1 << 40, dtype=torch.int64, **given_generator(g)),
        FLOATS,
    ),
    "bernoulli_p": (lambda x, g: torch.bernoulli(x, 0.3, generator=g), FLOATS),
    "normal_tensors": (lambda x, g: torch.normal(x, torch.ones_like(x), generator=g), (torch.float32, torch.float64)),
    "native_dropout": (lambda x, g: torch.native_dropout(x, 0.3, True), FLOATS),
    "dropout": (lambda x, g: F.dropout(x, 0.3), FLOATS),
    "dropout_of_nothing": (lambda x, g: torch.native_dropout(x, 0.0, True), FLOATS),
    "dropout_of_all": (lambda x, g: torch.native_dropout(x, 1.0, True), FLOATS),
    "dropout_in_evaluation": (lambda x, g: torch.native_dropout(x, 0.3, False), FLOATS),
    "alpha_dropout": (lambda x, g: F.alpha_dropout(x, 0.3, True), (torch.float32, torch.float64)),
    "gumbel_noise": (lambda x, g: torch.empty_like(x).exponential_(generator=g).log(), (torch.float32, torch.float64)),
}
TAKE_NO_GENERATOR = {name for name in EXACT if "dropout" in name}


def given_generator(generator):
    return {} if generator is None else {"generator": generator}


class Case(NamedTuple):
    sharding: Sharding
    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    passes_generator: bool

    def whole(self, device: str) -> torch.Tensor:
        """A tensor whose dims lie in memory in that order."""
        sizes = [self.sharding.shape[dim] for dim in self.order]
        inverse = sorted(range(len(sizes)), key=self.order.__getitem__)
        return (torch.arange(math.prod(sizes), device=device) % 7).reshape(sizes).permute(inverse).to(self.dtype)

    def draw(self, x: torch.Tensor, device: str) -> tuple[tuple[torch.Tensor, ...], bytes]:
        """What is drawn, and where the generator ends."""
        generator = default_generator(device)
        torch.manual_seed(11)
        torch.rand(100, device=device)
        if self.passes_generator and self.name not in TAKE_NO_GENERATOR:
            generator = torch.Generator(device)
            generator.set_state(default_generator(device).get_state())
        out = EXACT[self.name][0](x, None if generator is default_generator(device) else generator)
        return out if isinstance(out, tuple) else (out,), bytes(generator.get_state().numpy())


@st.composite
def cases(draw: Any, max_dim: int = 9, max_ranks: int = 8) -> Case:
    sharding = draw(shardings(max_dim).filter(lambda one: math.prod(one.mesh_shape) <= max_ranks))
    sharding = sharding._replace(placements=tuple(Replicate() if p.is_partial() else p for p in sharding.placements))
    name = draw(st.sampled_from(sorted(EXACT)))
    order = tuple(draw(st.permutations(range(len(sharding.shape)))))
    return Case(sharding, name, draw(st.sampled_from(EXACT[name][1])), order, draw(st.booleans()))


def check(case: Case, device: str) -> None:
    shape, mesh_shape, placements = case.sharding
    whole = case.whole(device)
    expected, end = case.draw(whole.clone(), device)

    def on_rank(rank, mesh):
        x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        if rank % 2:  # a local tensor whose memory is ordered as that of the whole
            local = x._local_tensor
            local = torch.empty_strided(
                local.shape, like_strides(local, case.order), dtype=local.dtype, device=device
            ).copy_(local)
            x = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=whole.stride())
        for _ in range(2):  # the first call of a spec, and one that remembers it
            x.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            ours, our_end = case.draw(x, device)
            for drawn, plain in zip(ours, expected):
                slices = distribute_tensor(plain, mesh, placements, src_data_rank=None)._local_tensor
                if plain.numel():  # torch's empty masks on the CPU are no masks
                    assert (drawn.dtype, strides(drawn)) == (plain.dtype, strides(plain))
                assert same_bits(drawn._local_tensor, slices), (rank, drawn._local_tensor, slices)
            assert our_end == end, "ends where the plain call ends"

    with tdr.install("single_device"):
        each_rank(mesh_shape, on_rank, device)


def like_strides(local, order):
    sizes = [local.shape[dim] for dim in order]
    strides = torch.empty(sizes, device="meta").stride()
    return [strides[order.index(dim)] for dim in range(local.ndim)]


def strides(x):
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


def same_bits(a, b):
    a, b = (torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


COLUMNS = Sharding((6, 9), (2, 2), (Shard(1), Shard(0)))
FSDP_TP = Sharding((9, 4), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))


@settings(max_examples=300, deadline=None)
@given(cases())
@example(Case(COLUMNS, "normal_", torch.float32, (1, 0), False))
@example(Case(FSDP_TP, "native_dropout", torch.bfloat16, (0, 1), False))
@example(Case(Sharding((0, 3), (2,), (Shard(0),)), "uniform_", torch.float32, (0, 1), True))
def test_every_shard_is_the_slice(case):
    check(case, "cpu")


@pytest.mark.parametrize("name", EXACT)
def test_every_op(name, device):
    for dtype in EXACT[name][1]:
        for sharding in (COLUMNS, FSDP_TP, Sharding((3, 5, 4), (2, 3), (Shard(2), Replicate()))):
            check(Case(sharding, name, dtype, tuple(range(len(sharding.shape))), False), device)
            check(Case(sharding, name, dtype, tuple(range(len(sharding.shape)))[::-1], True), device)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA: sizes around those where the kernels' launches change.
# ---------------------------------------------------------------------------------------------------------------------


def most_threads():
    properties = torch.cuda.get_device_properties(0)
    return 256 * properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uniform_", "normal_", "random_from_to_wide", "bernoulli_", "native_dropout"])
@pytest.mark.parametrize("values", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("more", [-300, -16, -2, -1, 0, 1, 2, 4, 8, 300])
def test_sizes_at_which_launches_change(name, values, more):
    numel = most_threads() * values + more
    for dtype in EXACT[name][1]:
        check(Case(Sharding((numel,), (3,), (Shard(0),)), name, dtype, (0,), False), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 255, 256, 257])
def test_small_sizes(numel):
    for name in ("normal_", "uniform_", "native_dropout", "exponential_"):
        check(Case(Sharding((numel,), (4,), (Shard(0),)), name, torch.float32, (0,), True), "cuda")


@pytest.mark.gpu
@settings(max_examples=300, deadline=None)
@given(cases(max_dim=300))
@example(Case(Sharding((3000, 3, 400), (2, 3), (Shard(2), Shard(0))), "normal_", torch.float32, (0, 1, 2), False))
@example(Case(Sharding((5000, 999), (8,), (Shard(1),)), "native_dropout", torch.bfloat16, (0, 1), False))
@example(Case(Sharding((2, 1), (2,), (Shard(0),)), "native_dropout", torch.float32, (1, 0), False))
@example(
    Case(
        Sharding((999, 5000), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "cauchy_",
        torch.float32,
        (1, 0),
        False,
    )
)
def test_every_shard_is_the_slice_on_cuda(case):
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mesh_shape", [(1, 8), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("name", ["uniform_", "normal_", "native_dropout", "random_", "exponential_"])
def test_every_rank_of_a_mesh(mesh_shape, name):
    placements = (Shard(0), Shard(1), Replicate())[: len(mesh_shape)]
    for dtype in (torch.float32, torch.bfloat16):
        for order in ((0, 1), (1, 0)):
            check(Case(Sharding((4100, 700), mesh_shape, placements), name, dtype, order, False), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name, dtype", [("uniform_", torch.float32), ("normal_", torch.bfloat16)])
@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_past_2_to_the_31_bytes(name, dtype, dim):
    rows = ((1 << 31) // dtype.itemsize + (1 << 27)) // 20000 + 77
    plain, end = Case(Sharding((rows, 20000), (4,), ()), name, dtype, (0, 1), False).draw(
        torch.empty(rows, 20000, dtype=dtype, device="cuda"), "cuda"
    )

    def on_rank(rank, mesh):
        x = dtensor_empty((rows, 20000), dtype=dtype, device_mesh=mesh, placements=[Shard(dim)])
        (drawn,), our_end = Case(Sharding((rows, 20000), (4,), ()), name, dtype, (0, 1), False).draw(x, "cuda")
        assert torch.equal(drawn._local_tensor, plain[0].chunk(4, dim)[rank])
        assert our_end == end

    with tdr.install("single_device"):
        each_rank((4,), on_rank, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_beside_the_shard(dim, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(_single_device, "_kernels", lambda: None)
    mesh = as_rank(3, (8,), "cuda")
    with tdr.install("single_device"):
        x = dtensor_empty(131072, 16384, device_mesh=mesh, placements=[Shard(dim)])  # 8 GiB
        dtensor_empty(8, 8, device_mesh=mesh, placements=[Shard(dim)]).normal_()  # looks at the kernels
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.nn.init.normal_(x)
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20


INITS = {
    "embedding": ((1000, 512), lambda w: torch.nn.init.normal_(w, 0, 0.02)),
    "query": ((512, 512), lambda w: torch.nn.init.xavier_uniform_(w)),
    "key": ((512, 512), lambda w: torch.nn.init.xavier_normal_(w)),
    "up": ((2048, 512), lambda w: torch.nn.init.kaiming_uniform_(w, a=math.sqrt(5))),
    "down": ((512, 2048), lambda w: torch.nn.init.kaiming_normal_(w)),
    "gate": ((777, 333), lambda w: torch.nn.init.trunc_normal_(w, 0, 0.02, -0.04, 0.04)),
    "head": ((1000, 512), lambda w: torch.nn.init.uniform_(w, -0.1, 0.1)),
}


@pytest.mark.gpu
def test_the_parameters_of_a_model_on_cuda():
    torch.manual_seed(0)
    plain = {name: init(torch.empty(shape, device="cuda")) for name, (shape, init) in INITS.items()}
    end = torch.cuda.get_rng_state()
    fsdp_tp = [_StridedShard(0, split_factor=2), Shard(0)], [Shard(0), Shard(1)]

    def on_rank(rank, mesh):
        torch.manual_seed(0)
        for i, (name, (shape, init)) in enumerate(INITS.items()):
            whole = torch.zeros(shape, device="cuda")
            w = init(distribute_tensor(whole, mesh, fsdp_tp[i % 2], src_data_rank=None))
            expected = distribute_tensor(plain[name], mesh, fsdp_tp[i % 2], src_data_rank=None)
            assert torch.equal(w.to_local(), expected.to_local()), name
        assert torch.equal(end, torch.cuda.get_rng_state())

    with tdr.install("single_device"):
        each_rank((4, 2), on_rank, "cuda")
