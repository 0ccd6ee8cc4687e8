"""Policy single_device: what cannot be exact, what is refused, and how windows and replays fit together.

The stock CUDA kernels are played on the CPU here, by a few lines that write down where each value comes from.
"""

import functools
import itertools
import math
import re
import warnings
from types import SimpleNamespace
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._random as torch_random
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_attention import ARGUMENTS, ATTENTION
from test_disjoint import Sharding
from test_local_tensor import rank_states, shards
from test_single_device import EXACT, TAKE_NO_GENERATOR, Case, check, same_bits
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty
from torch.nn.attention import SDPBackend, sdpa_kernel
from worlds import as_rank, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _dispatch, _ops, _shard, _single_device, _stream

aten = torch.ops.aten

# name -> op(x, generator), on probabilities or the like.
INEXACT: dict[str, Any] = {
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "poisson": lambda x, g: torch.poisson(x * 9, generator=g),
    "binomial": lambda x, g: torch.binomial(torch.full_like(x, 30), x, generator=g),
    "_standard_gamma": lambda x, g: torch._standard_gamma(x, generator=g),
    "_sample_dirichlet": lambda x, g: torch._sample_dirichlet(x, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 5, True, generator=g),
    "rrelu_with_noise": lambda x, g: aten.rrelu_with_noise(-x, torch.empty_like(x), 0.1, 0.9, True, g),
}


def probabilities(mesh, placements):
    whole = torch.linspace(0.2, 0.8, 48).view(8, 6)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def warned_of(caught):
    return [str(one.message).partition(":")[0] for one in caught if "single_device" in str(one.message)]


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be exact.
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INEXACT)
def test_strict_raises_and_moves_nothing(name):
    def on_rank(rank, mesh):
        x = probabilities(mesh, [Shard(0)])
        generator = torch.Generator().manual_seed(3)
        before, theirs = torch.get_rng_state(), generator.get_state()
        for _, passed in itertools.product(range(2), (None, generator)):
            with pytest.raises(NotImplementedError, match=f"aten.{name}.*policy 'single_device'.*strict=False"):
                INEXACT[name](x, passed)
            assert torch.equal(before, torch.get_rng_state()) and torch.equal(theirs, generator.get_state())

    with tdr.install("single_device", strict=True):
        each_rank((2,), on_rank)


@pytest.mark.parametrize("name", INEXACT)
def test_else_it_warns_once_and_is_in_step_and_disjoint(name):
    def on_rank(rank, mesh):
        x = probabilities(mesh, [Shard(0), Replicate()])
        x.copy_(torch.full_like(x, 0.4))  # so that shards differ by what they draw alone
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with tdr.install("single_device"):
                drawn = [INEXACT[name](x, None).to_local().clone() for _ in range(3)]
                end = torch.get_rng_state()
                generator = torch.Generator().manual_seed(3)
                passed = INEXACT[name](x, generator).to_local()
        assert [one.startswith(f"aten.{name}") for one in warned_of(caught)] == [True]
        assert same_bits(passed, drawn[0])
        assert not any(map(same_bits, drawn, drawn[1:]))
        return drawn, end

    results = each_rank((2, 2), on_rank)
    assert all(torch.equal(end, results[0][1]) for _, end in results)
    for first, second, other, _ in zip(*(drawn for drawn, _ in results)):
        assert same_bits(first, second) and not same_bits(first, other)


def test_each_op_and_each_installation_warns():
    mesh = as_rank(0, (2,))
    x = probabilities(mesh, [Shard(0)])
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, tdr.install("single_device"):
            warnings.simplefilter("always")
            for _, name in itertools.product(range(2), ("poisson", "bernoulli")):
                INEXACT[name](x, None)
        assert warned_of(caught) == ["aten.poisson.default", "aten.bernoulli.default"]


@pytest.mark.parametrize("name", INEXACT)
def test_replicated_they_are_exact(name):
    def on_rank(rank, mesh):
        x = probabilities(mesh, [Replicate(), Replicate()])
        for generator, plains in ((None, None), (torch.Generator(), torch.Generator())):
            torch.manual_seed(3)
            plain = INEXACT[name](x.to_local(), plains)
            end = torch.get_rng_state()
            torch.manual_seed(3)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                drawn = INEXACT[name](x, generator)
            assert same_bits(drawn.to_local(), plain)
            assert torch.equal(torch.get_rng_state(), end)
            assert generator is None or torch.equal(generator.get_state(), plains.get_state())

    with tdr.install("single_device", strict=True):
        each_rank((2, 2), on_rank)


@pytest.mark.parametrize("name", ATTENTION)
def test_fused_attention_with_dropout(name, monkeypatch):
    mesh = as_rank(1, (2, 2))
    row = ATTENTION[name]
    policy = _dispatch.Policy(exact=True, strict=True)
    with tdr.install("single_device", strict=True):
        monkeypatch.setitem(DTensor._op_dispatcher._custom_op_handlers, row.op, _dispatch.make_handler(row, policy))
        q = empty(4, 4, 6, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)]).fill_(1)
        before = torch.get_rng_state()
        with pytest.raises(NotImplementedError, match=f"aten.{name}.*policy 'single_device'"):
            row.op(q, q, q, *ARGUMENTS[name])
        assert torch.equal(before, torch.get_rng_state())


def test_attention_on_the_math_path_is_exact():
    torch.manual_seed(3)
    whole = torch.randn(4, 4, 6, 8)
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(whole, whole, whole, dropout_p=0.5)
    end = torch.get_rng_state()

    def on_rank(rank, mesh):
        # Torch 2.11 has no rule for sharded heads there.
        q = distribute_tensor(whole, mesh, [Shard(0), Replicate()], src_data_rank=None)
        torch.manual_seed(3)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        expected = distribute_tensor(plain, mesh, out.placements, src_data_rank=None)
        torch.testing.assert_close(out.to_local(), expected.to_local())
        assert torch.equal(torch.get_rng_state(), end)

    with tdr.install("single_device", strict=True):
        each_rank((2, 2), on_rank)


# ---------------------------------------------------------------------------------------------------------------------
# Errors, and what leaves the generator alone.
# ---------------------------------------------------------------------------------------------------------------------


class TestErrors(expecttest.TestCase):
    def check(self, error: type[BaseException], text: str, call, *args, **kwargs) -> None:
        before = torch.get_rng_state()
        with self.assertRaises(error) as raised:
            call(*args, **kwargs)
        self.assertExpectedInline(str(raised.exception), text, skip=1)
        self.assertTrue(torch.equal(torch.get_rng_state(), before))

    def setUp(self) -> None:
        self.mesh = as_rank(1, (2,))
        self.addCleanup(dist.destroy_process_group)

    def test_policies(self):
        self.check(
            ValueError,
            """install expects strict=True only with policy='single_device', found policy='offset'""",
            functools.partial(tdr.install, strict=True),
            "offset",
        )
        self.check(
            ValueError,
            """install expects policy to be one of 'offset', 'single_device', found None""",
            tdr.install,
            None,
        )

    def test_strict(self):
        with tdr.install("single_device", strict=True):
            self.check(
                NotImplementedError,
                """aten.poisson.default: cannot draw the numbers of one device for a sharded DTensor (policy 'single_device'): they depend on tensors, or on the sizes of the local call. Redistribute the input to Replicate, or install with strict=False.""",
                torch.poisson,
                probabilities(self.mesh, [Shard(0)]),
            )

    def test_generator_of_another_device(self):
        x = empty(16, 6, device_mesh=self.mesh, placements=[Shard(0)])
        wrong = {"generator": SimpleNamespace(device=torch.device("cuda:1"))}  # a real one needs a CUDA build
        text = """Expected a 'cpu' device type for generator but found 'cuda': the local tensor of the DTensor is on cpu, the generator on cuda:1."""
        op = aten.uniform_.default
        with tdr.install("single_device"):
            handler = DTensor._op_dispatcher._custom_op_handlers[op]
            self.check(RuntimeError, text, handler, op, (x,), wrong)
            x.uniform_()  # from here on the spec is known
            self.check(RuntimeError, text, handler, op, (x,), wrong)


@pytest.mark.parametrize("rank", [0, 2])  # the last one's shard is empty
def test_an_op_that_refuses_its_arguments_moves_nothing(rank):
    mesh = as_rank(rank, (3,))
    x = empty(2, 6, device_mesh=mesh, placements=[Shard(0)]).fill_(7)
    generator = torch.Generator().manual_seed(3)
    before, theirs = torch.get_rng_state(), generator.get_state()
    with tdr.install("single_device"):
        for _, passed in itertools.product(range(2), (None, generator)):
            with pytest.raises(RuntimeError, match="uniform_ expects to return a"):
                x.uniform_(2.0, 1.0, generator=passed)
            with pytest.raises(RuntimeError, match="normal expects std"):
                x.normal_(0.0, -1.0, generator=passed)
        with pytest.raises(RuntimeError, match="expects p to be in"):
            torch.native_dropout(x, 1.5, True)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(theirs, generator.get_state())
    assert bool((x.to_local() == 7).all())


def test_an_op_that_raises_midway_leaves_the_generator(monkeypatch):
    in_windows_of(monkeypatch, 32)
    calls = []

    def interrupted(x, generator):
        x.uniform_(generator=generator)
        calls.append(x.numel())
        if x.numel() == 32 and len(calls) > 3:
            raise KeyboardInterrupt
        return x

    row = _ops.RandomOp("uniform_.default", interrupted, in_place=True, fill=interrupted)
    assert _single_device._draws_one_after_another(row, torch.float32, ())
    calls.clear()
    shard = _shard.ShardSlice((0,), (200,), (1,), (((0, 100),),))
    for passed in ({}, {"generator": torch.Generator().manual_seed(3)}):
        generator = passed.get("generator", torch.default_generator)
        before = generator.get_state()
        with pytest.raises(KeyboardInterrupt):
            _single_device.draw(row, shard, torch.empty(100), (), passed)
        assert torch.equal(before, generator.get_state())
    assert calls == [32] * 5


def test_regions_switched_off():
    def on_rank(rank, mesh):
        x = empty(8, 6, device_mesh=mesh, placements=[Shard(0)])
        x.uniform_()
        torch_random._rng_tracker.distribute_region_enabled = False
        torch.manual_seed(3)
        drawn = x.uniform_().to_local().clone(), INEXACT["poisson"](x.fill_(1), None).to_local()
        end = torch.get_rng_state()
        torch.manual_seed(3)
        plain = torch.empty(4, 6).uniform_(), INEXACT["poisson"](torch.ones(4, 6), None)
        assert all(map(torch.equal, drawn, plain))
        assert torch.equal(end, torch.get_rng_state())
        torch_random._rng_tracker.distribute_region_enabled = True

    with tdr.install("single_device", strict=True):
        each_rank((2,), on_rank)


def test_ranks_outside_the_mesh():
    as_rank(3, (4,))
    part = DeviceMesh("cpu", [0, 1])
    before = torch.get_rng_state()
    with tdr.install("single_device", strict=True):
        x = empty(8, 6, device_mesh=part, placements=[Shard(0)])
        y = torch.randn_like(x.uniform_())
        out, mask = torch.native_dropout(y, 0.5, True)
        torch.poisson(y)
    assert torch.equal(before, torch.get_rng_state())
    assert y.shape == (8, 6) and y.to_local().numel() == out.to_local().numel() == 0
    assert mask.to_local().dtype == torch.bool


@pytest.mark.parametrize("shape, dim", [((2, 5), 0), ((3, 2), 1), ((1,), 0), ((0, 4), 1)])
def test_empty_shards_end_where_the_plain_call_ends(shape, dim):
    for name in ("normal_", "random_from_to", "rand_like", "native_dropout", "exponential_"):
        placements = (Shard(dim),)
        check(Case(Sharding(shape, (4,), placements), name, torch.float32, tuple(range(len(shape))), True), "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Installations inside one another, and simulated ranks.
# ---------------------------------------------------------------------------------------------------------------------


def test_policies_nest():
    def on_rank(rank, mesh):
        x = empty(8, 6, device_mesh=mesh, placements=[Shard(0)])

        def is_exact():
            torch.manual_seed(3)
            plain, end = torch.empty(8, 6).uniform_(), torch.get_rng_state()
            torch.manual_seed(3)
            same = torch.equal(x.uniform_().to_local(), plain.chunk(2)[rank])
            assert torch.equal(torch.get_rng_state(), end) is same
            return same

        with tdr.install("single_device") as outer:
            found = [is_exact(), is_exact()]
            with tdr.install("offset"):
                found += [is_exact(), is_exact()]
                with tdr.install("single_device", strict=True) as inner:
                    found += [is_exact(), is_exact()]
                    assert (outer.policy, outer.strict, inner.strict) == ("single_device", False, True)
                found.append(is_exact())
            found += [is_exact(), is_exact()]
        assert found == [True, True, False, False, True, True, False, True, True]

    each_rank((2,), on_rank)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "randn_like", "random_", "native_dropout", "dropout"])
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())])
def test_simulated_ranks(name, placements):
    shape, (op, _) = (17, 6), EXACT[name]
    torch.manual_seed(3)
    plain = op(torch.ones(shape), None)
    plain = plain if isinstance(plain, tuple) else (plain,)
    end = bytes(torch.get_rng_state().numpy())

    def slices(rank, mesh):
        return [distribute_tensor(one, mesh, placements, src_data_rank=None).to_local() for one in plain]

    expected = each_rank((2, 2), slices)

    def check_all(drawn):
        of_ranks = zip(*map(shards, drawn if isinstance(drawn, tuple) else (drawn,)), strict=True)
        for ours, theirs in zip(of_ranks, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))

    mesh = as_rank(0, (2, 2))
    with tdr.install("single_device", strict=True), LocalTensorMode(4) as mode:
        for _ in range(2):
            x = empty(*shape, device_mesh=mesh, placements=placements).fill_(1)
            torch.manual_seed(3)
            check_all(op(x, None))
            assert rank_states(mode, "cpu") == [end] * 4
        if name not in TAKE_NO_GENERATOR:
            before, generator = rank_states(mode, "cpu"), torch.Generator().manual_seed(3)
            check_all(op(x, generator))
            assert bytes(generator.get_state().numpy()) == end
            assert rank_states(mode, "cpu") == before


# ---------------------------------------------------------------------------------------------------------------------
# CPU: windows.
# ---------------------------------------------------------------------------------------------------------------------


def in_windows_of(monkeypatch, window):
    """Makes the windows small; returns the list of how many elements are drawn at once."""
    drawn = []

    def keep(shard, elements, begin, target, keep=_single_device._keep):
        drawn.append(elements.numel())
        keep(shard, elements, begin, target)

    in_windows = functools.partial(_single_device._in_windows, window=window)
    monkeypatch.setattr(_single_device, "_in_windows", in_windows)
    monkeypatch.setattr(_single_device, "_keep", keep)
    return drawn


@pytest.mark.parametrize("window", [16, 32, 48])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 143, 331])
def test_windows(window, numel, monkeypatch):
    drawn = in_windows_of(monkeypatch, window)
    for name in ("normal_", "uniform_", "random_", "native_dropout"):
        for dtype in EXACT[name][1]:
            del drawn[:]
            check(Case(Sharding((numel,), (2,), (Shard(0),)), name, dtype, (0,), True), "cpu")
            if name == "uniform_" and numel >= window + 16:
                assert max(drawn) < window + 16 and len(drawn) > 2 * (numel // window)


@pytest.mark.parametrize("name", EXACT)
def test_windows_of_every_op(name, monkeypatch):
    in_windows_of(monkeypatch, 32)
    for dtype in EXACT[name][1]:
        for sharding in (Sharding((7, 19), (2, 2), (Shard(1), Shard(0))), Sharding((3, 5, 11), (3,), (Shard(2),))):
            check(Case(sharding, name, dtype, tuple(range(len(sharding.shape))), False), "cpu")


def is_serial(fill, dtype):
    """Whether pieces of 16 or more, drawn one after another, are what is drawn at once."""
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    whole = fill(torch.empty(240, dtype=dtype), generator=generators[0])
    pieces = torch.cat([fill(torch.empty(16, dtype=dtype), generator=generators[1]) for _ in range(15)])
    return same_bits(whole, pieces) and torch.equal(*(one.get_state() for one in generators))


ROWS = {
    "uniform_.default": (),
    "normal_.default": (),
    "exponential_.default": (),
    "bernoulli_.float": (0.3,),
    "cauchy_.default": (),
    "log_normal_.default": (),
    "geometric_.default": (0.3,),
    "random_.default": (),
}


@pytest.mark.parametrize("overload", ROWS)
def test_whether_a_kernel_draws_one_after_another_is_looked_at(overload):
    row, args = next(row for row in _ops.TABLE if row.overload == overload), ROWS[overload]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):

        def fill(x, generator, row=row):
            return row.fill(x, *args, generator=generator)

        assert _single_device._draws_one_after_another(row, dtype, args) is is_serial(fill, dtype)


def backwards(x, generator):
    return x.copy_(torch.rand(x.shape, generator=generator).flatten().flip(0).view(x.shape))


def a_number_too_many(x, generator):
    torch.rand(1, generator=generator)
    return x.uniform_(generator=generator)


def by_size(x, generator):
    """As normal_() is, below 16 elements."""
    return x.copy_(torch.rand(x.shape, generator=generator) * (1 if x.numel() < 17 else 2))


@pytest.mark.parametrize("fill", [backwards, a_number_too_many, by_size])
def test_a_kernel_that_is_not_serial_is_drawn_in_one_piece(fill, monkeypatch):
    drawn = in_windows_of(monkeypatch, 32)
    row = _ops.RandomOp("uniform_.default", fill, in_place=True, fill=fill)
    assert not _single_device._draws_one_after_another(row, torch.float32, ())
    del drawn[:]
    plain = torch.Generator().manual_seed(3)
    whole = fill(torch.empty(20, 10), plain)
    for held in (((0, 7),), ((7, 13), (15, 20))):
        generator = torch.Generator().manual_seed(3)
        shard = _shard.ShardSlice((0, 1), (20, 10), (10, 1), (held, ((0, 10),)))
        local = torch.empty(sum(stop - start for start, stop in held), 10)
        _single_device.draw(row, shard, local, (), {"generator": generator})
        assert torch.equal(local, torch.cat([whole[start:stop] for start, stop in held]))
        assert torch.equal(generator.get_state(), plain.get_state())
    assert drawn == []


# ---------------------------------------------------------------------------------------------------------------------
# CUDA: replay, on kernels that write down where each value comes from.
# ---------------------------------------------------------------------------------------------------------------------

# Small, so that a few thousand elements are several groups and several parts; a group is never as large as a part.
_LARGEST, _FILL, _SCRATCH = (1 << 16) - 1, 1 << 15, 1 << 14


class Offset:
    """The part of a CUDA generator that is used."""

    def __init__(self, offset):
        self.offset = offset

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset


def threads_of(numel, most):
    return 256 * min(most // 256, math.ceil(numel / 256))


def split_until_addressed(x):
    if 1 + (x.numel() - 1) * x.element_size() <= _LARGEST:
        return [x]
    return [part for half in x.tensor_split([x.numel() // 2]) for part in split_until_addressed(half)]


def stock_fill(most, values, x, generator):
    """What a kernel of DistributionTemplates.h draws: for each element of ``x``, the subsequence, the counter and the lane."""
    numel, offset = x.numel(), generator.get_offset()
    launched = threads_of(numel, most)
    generator.set_offset(offset + ((numel - 1) // (launched * values) + 1) * 4)
    parts = split_until_addressed(x)
    if len(parts) > 1:
        for part in parts:
            stock_fill(most, values, part, generator)
        return x
    li = torch.arange(numel)
    counter, lane = offset // 4 + li // (launched * values), li // launched % values
    return x.copy_((counter * 4 + lane) * 1024 + li % launched)


@pytest.fixture(scope="module")
def small_numbers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stream, "_LARGEST_32_BIT", _LARGEST)
        patch.setattr(_single_device, "_FILL_BYTES", _FILL)
        patch.setattr(_single_device, "_SCRATCH_BYTES", _SCRATCH)
        _stream.stream_of.cache_clear()
        yield
    _stream.stream_of.cache_clear()


def fill_row(most, values):
    return SimpleNamespace(fill=functools.partial(stock_fill, most, values))


def whole_of(numel, most, values, base):
    """What one device draws, and where its generator ends."""
    generator = Offset(base)
    whole = torch.empty(numel, dtype=torch.int64)
    stock_fill(most, values, whole, generator)
    return whole, generator.get_offset()


LAUNCHES = (st.sampled_from([256, 512, 768]), st.sampled_from([2, 4]), st.integers(0, 50).map(lambda n: n * 4))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40000), *LAUNCHES, st.floats(0, 1), st.floats(0, 1))
@example(8192, 256, 4, 0, 0.0, 1.0)  # just not split
@example(8193, 256, 4, 0, 0.0, 1.0)
@example(40000, 768, 2, 8, 0.124, 0.126)
@example(1, 512, 4, 4, 0.0, 1.0)
def test_replay_of_any_part_is_that_part_of_the_whole(small_numbers, numel, most, values, base, one, other):
    begin, end = sorted((int(one * numel), int(other * numel)))
    whole, plain_end = whole_of(numel, most, values, base)
    stream = _stream.stream_of(numel, 8, most, values)
    assert base + stream.end == plain_end
    assert [leaf.begin for leaf in stream.leaves] == [0, *(leaf.end for leaf in stream.leaves[:-1])]
    assert stream.leaves[-1].end == numel
    into = torch.full((end - begin,), -1)
    _single_device._replay(fill_row(most, values), (), Offset(0), base, stream, begin, end, into)  # type: ignore[arg-type]
    assert torch.equal(into, whole[begin:end])


@pytest.mark.parametrize("most", [256, 512, 768])
def test_threads_and_advance(most):
    for numel in (1, 255, 256, 257, most - 1, most, most + 1, 2 * most, 4 * most - 1, 4 * most, 4 * most + 1, 9999):
        assert _stream.threads(numel, most) == threads_of(numel, most)
        for values in (2, 4):
            generator = Offset(0)
            stock_fill(most, values, torch.empty(numel, dtype=torch.int8), generator)
            assert _stream.advance(numel, most, values) == generator.get_offset()


@st.composite
def held_parts(draw: Any) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """A shape, and for each dim the ranges that are held: ascending and apart."""
    shape = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    held = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4, unique=True)))
        held.append(tuple(zip(cuts[::2], cuts[1::2])) if draw(st.booleans()) else ((0, size),))
    return shape, tuple(held)


@settings(max_examples=200, deadline=None)
@given(held_parts(), *LAUNCHES)
@example(((60, 300, 2), (((3, 40),), ((0, 300),), ((0, 2),))), 256, 4, 8)  # long runs
@example(((30, 1000), (((0, 30),), ((10, 20), (500, 990)))), 512, 2, 0)  # columns
@example(((30000,), (((5, 29000),),)), 768, 4, 4)
def test_replay_of_a_shard_is_the_slice(small_numbers, part, most, values, base):
    shape, held = part
    numel = math.prod(shape)
    whole, _ = whole_of(numel, most, values, base)
    expected = whole.view(shape)
    for dim, ranges in enumerate(held):
        expected = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in ((0, 0), *ranges)], dim)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    shard = _shard.ShardSlice(tuple(range(len(shape))), shape, strides, held)
    stream = _stream.stream_of(numel, 8, most, values)
    replay = functools.partial(_single_device._replay, fill_row(most, values), (), Offset(0), base, stream)
    target = torch.full(expected.shape, -1)
    _single_device._replay_shard(replay, shard, stream, target)
    assert torch.equal(target, expected)


@given(st.lists(st.integers(1, 6), max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_boxes_are_the_elements_in_order(shape, one, other):
    elements = torch.arange(math.prod(shape)).view(shape)
    begin, end = sorted((round(one * elements.numel()), round(other * elements.numel())))
    found = [
        elements[tuple(slice(*of_dim) for of_dim in box)].flatten() for box in _shard.boxes(tuple(shape), begin, end)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(begin, end))
    assert all(box.diff().eq(1).all() for box in found)


# ---------------------------------------------------------------------------------------------------------------------
# native_dropout on CUDA.
# ---------------------------------------------------------------------------------------------------------------------


def vector_of(numel, element_size):
    return max(n for n in (1, 2, 4, 8) if numel % n == 0 and n * element_size <= 16)


def stock_dropout(most, x, generator):
    """What Dropout.cu draws, thread by thread: for each element a number that stands for thread, counter and lane."""
    numel, base = x.numel(), generator.get_offset()
    launched, vector = threads_of(numel, most), vector_of(numel, x.element_size())
    thread = torch.arange(launched)
    drawn = torch.full((numel + 8 * launched,), -1)
    counter = base // 4
    for start in range(0, numel, launched * max(vector, 4 if vector == 1 else 0)):
        for i in range(4 if vector == 1 else vector):
            at = start + (thread + i * launched if vector == 1 else thread * vector + i)
            drawn[at] = ((counter + i // 4) * 4 + i % 4) * 1024 + thread
        counter += math.ceil(vector / 4)  # a call is made for 2 elements too
    generator.set_offset(base + ((numel - 1) // (launched * 4) + 1) * 4)
    mixed = drawn[:numel] * 40503 % 32749
    return x + mixed.to(x.dtype), mixed % 2 == 0


DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 20000),
    st.sampled_from([256, 512, 768]),
    st.sampled_from([2, 4, 8]),
    st.floats(0, 1),
    st.floats(0, 1),
)
@example(12345, 256, 4, 0.3, 0.9)
@example(12346, 256, 4, 0.3, 0.9)
@example(12348, 256, 2, 0.3, 0.9)
@example(12352, 256, 2, 0.3, 0.9)
@example(12346, 512, 8, 0.0, 1.0)
def test_replay_of_dropout(numel, most, element_size, one, other):
    begin, end = sorted((int(one * numel), int(other * numel)))
    generator = Offset(40)
    x = (torch.arange(numel) % 5).to(DTYPES[element_size])
    wholes = stock_dropout(most, x, generator)
    plain_end = generator.get_offset()
    row = SimpleNamespace(call=lambda x, p, train: stock_dropout(most, x, generator))
    shard = _shard.ShardSlice((0,), (numel,), (1,), (((begin, end),) if begin < end else (),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_single_device, "most_threads_of", lambda device: most)
        for scratch in (0, 1 << 15, 1 << 30):
            generator.set_offset(40)
            parts = _single_device._replay_dropout(row, shard, x[begin:end], 0.5, True, generator, scratch)  # type: ignore[arg-type]
            assert all(torch.equal(part, whole[begin:end]) for part, whole in zip(parts, wholes))
            assert generator.get_offset() == plain_end


def test_how_far_dropout_reads():
    """A thread that takes 2 elements a call throws half of it away: where those of float64 or of an even number that 4
    does not divide lie, it reads 16 offsets for 8 elements, and 8 offsets else."""
    assert [_single_device._dropout_offsets(n, 4) for n in (100, 101, 102, 103, 104)] == [8, 8, 16, 8, 8]
    assert [_single_device._dropout_offsets(n, 2) for n in (96, 100, 101, 102)] == [8, 8, 8, 16]
    assert [_single_device._dropout_offsets(n, 8) for n in (100, 101, 102, 104)] == [16, 8, 16, 16]


@pytest.mark.parametrize("drawn_by, known", [((512, 4), True), ((512, 2), False), ((256, 4), False)])
def test_a_kernel_that_lays_its_numbers_out_otherwise_is_refused(drawn_by, known, monkeypatch):
    """The first use of an op on a device looks at its kernel, on a generator beside the stream."""
    drawn = []

    def fill(x, generator):
        drawn.append(x.numel())
        return stock_fill(*drawn_by, x, generator)

    row = SimpleNamespace(fill=fill, op="aten.fill_", overload="fill_")
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: Offset(0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    monkeypatch.setattr(_single_device, "most_threads_of", lambda device: 512)
    monkeypatch.setattr(_single_device, "_checked", set())

    def look():
        _single_device._check(row, torch.int64, torch.device("cpu"), (), 4)

    if known:
        look()
        del drawn[:]
        look()
        assert drawn == [], "once is enough"
    else:
        with pytest.raises(RuntimeError, match=rf"^aten.fill_: torch {re.escape(torch.__version__)} lays the numbers"):
            look()
