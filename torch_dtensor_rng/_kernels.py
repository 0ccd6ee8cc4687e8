"""Fused fills of a shard on CUDA, in Triton: each element gets the Philox words of its own place in the stream of the whole
tensor, and goes straight into the local tensor.

The formulas are those of the stock kernels (ATen/core/TransformationHelper.h, ATen/native/cuda/DistributionTemplates.h and
Dropout.cu) and of cuRAND, down to the rounding; ``_single_device`` compares each with the stock op before it trusts it.
Imported where Triton is.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ._shard import ShardSlice
from ._stream import Stream, advance, stream_of, threads

UNIFORM, NORMAL, LOG_NORMAL, EXPONENTIAL, BERNOULLI, RANDOM = map(tl.constexpr, range(6))

# ---------------------------------------------------------------------------------------------------------------------
# Values of Philox words.
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _seed_and_counter(seed, counter, CAPTURED: tl.constexpr):
    """As they are; or in a CUDA graph, where they point to the seed and the offset of the replay, the counter
    ``CAPTURED`` further than that offset."""
    if CAPTURED < 0:
        return seed, counter
    else:
        return tl.load(seed), tl.load(counter) // 4 + CAPTURED


@triton.jit
def _words(seed, counter, thread):
    """The four words of a Philox call: of 64-bit ``counter``, a quarter of the offset, in the subsequence ``thread``."""
    zero = tl.zeros_like(thread).to(tl.uint32)
    wide = counter.to(tl.int64)
    low = wide.to(tl.uint32) + zero
    high = (wide >> 32).to(tl.uint32) + zero
    return tl.philox(seed, low, high, thread.to(tl.uint32), zero)


@triton.jit
def _uniform(word):
    """(0, 1], as ``_curand_uniform`` of curand_uniform.h."""
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def _radius(word):
    return tl.sqrt_rn(-2.0 * libdevice.log(_uniform(word)))


@triton.jit
def _angle(word):
    return word.to(tl.float32) * 1.4629180792671596e-09 + 7.314590396335798e-10


@triton.jit
def _transformed(x, word, a, b, c, KIND: tl.constexpr, dtype: tl.constexpr):
    """The value of a uniform or normal ``x``, or of its word."""
    if KIND == UNIFORM:
        value = (x * b + a).to(dtype)
        return tl.where(value == c.to(dtype), a.to(dtype), value)
    if KIND == NORMAL:
        return (x * b + a).to(dtype)
    if KIND == LOG_NORMAL:
        return libdevice.fast_expf(x * b + a).to(dtype)
    if KIND == EXPONENTIAL:
        half = 5.9604644775390625e-08
        return (a * tl.where(x >= 1.0 - half, -half, libdevice.fast_logf(x))).to(dtype)
    if KIND == BERNOULLI:
        return (x < a).to(dtype)
    return ((word % b.to(tl.uint32)).to(tl.int64) + a).to(dtype)


@triton.jit
def _four(seed, counter, thread, a, b, c, KIND: tl.constexpr, dtype: tl.constexpr):
    w0, w1, w2, w3 = _words(seed, counter, thread)
    if KIND == NORMAL or KIND == LOG_NORMAL:  # noqa: SIM109
        r0, r2 = _radius(w0), _radius(w2)
        v0, v2 = _angle(w1), _angle(w3)
        x0, x1, x2, x3 = (
            r0 * libdevice.fast_sinf(v0),
            r0 * libdevice.fast_cosf(v0),
            r2 * libdevice.fast_sinf(v2),
            r2 * libdevice.fast_cosf(v2),
        )
    else:
        x0, x1, x2, x3 = _uniform(w0), _uniform(w1), _uniform(w2), _uniform(w3)
    return (
        _transformed(x0, w0, a, b, c, KIND, dtype),
        _transformed(x1, w1, a, b, c, KIND, dtype),
        _transformed(x2, w2, a, b, c, KIND, dtype),
        _transformed(x3, w3, a, b, c, KIND, dtype),
    )


@triton.jit
def _pick(w0, w1, w2, w3, lane):
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def _one(seed, counter, thread, lane, a, b, c, KIND: tl.constexpr, dtype: tl.constexpr):
    w0, w1, w2, w3 = _words(seed, counter, thread)
    if KIND == NORMAL or KIND == LOG_NORMAL:  # noqa: SIM109
        radius = _radius(tl.where(lane < 2, w0, w2))
        angle = _angle(tl.where(lane < 2, w1, w3))
        x = radius * tl.where(lane % 2 == 0, libdevice.fast_sinf(angle), libdevice.fast_cosf(angle))
        return _transformed(x, w0, a, b, c, KIND, dtype)
    word = _pick(w0, w1, w2, w3, lane)
    return _transformed(_uniform(word), word, a, b, c, KIND, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Fills.
# ---------------------------------------------------------------------------------------------------------------------

_VARY = ["first_group", "seed", "counter", "a", "b", "c"]


@triton.jit(do_not_specialize=_VARY)
def fill_run(
    out, numel, begin, first_group, threads, row, width, column, seed, counter, a, b, c,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CAPTURED: tl.constexpr,
):  # fmt: skip
    """A run of elements of the whole, from ``begin`` on; or of columns, ``width`` of a ``row`` that divides ``threads``,
    from ``column`` on, which are a run of as many threads as hold them. A thread makes one Philox call for its four."""
    seed, counter = _seed_and_counter(seed, counter, CAPTURED)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = first_group + tl.program_id(1)
    if ROWS:
        held = threads
        thread = u
    else:
        held = threads // row * width
        thread = u // width * row + column + u % width
    x0, x1, x2, x3 = _four(seed, counter + group, thread, a, b, c, KIND, out.dtype.element_ty)
    i = group.to(tl.int64) * 4 * held + u - begin
    ok = u < held
    tl.store(out + i, x0, mask=ok & (i >= 0) & (i < numel))
    i += held
    tl.store(out + i, x1, mask=ok & (i >= 0) & (i < numel))
    i += held
    tl.store(out + i, x2, mask=ok & (i >= 0) & (i < numel))
    i += held
    tl.store(out + i, x3, mask=ok & (i >= 0) & (i < numel))


@triton.jit
def _box(n1, n2, numel, first, g0, g1, l0, l1, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of a box: whether they are of it, and their indices in the leaf and in the local tensor."""
    if WIDE:
        e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = e // n2
    i2 = e - rest * n2
    i0 = rest // n1
    i1 = rest - i0 * n1
    return e < numel, first + i0 * g0 + i1 * g1 + i2, i0 * l0 + i1 * l1 + i2


@triton.jit(do_not_specialize=_VARY)
def fill_box(
    out, numel, n1, n2, first, size, g0, g1, l0, l1, threads, seed, counter, a, b, c,
    KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CAPTURED: tl.constexpr,
):  # fmt: skip
    """A box of up to three dims, wherever its elements are: each makes a Philox call, and takes its word."""
    seed, counter = _seed_and_counter(seed, counter, CAPTURED)
    ok, index, at = _box(n1, n2, numel, first, g0, g1, l0, l1, WIDE, BLOCK)
    q = index // threads
    thread = (index - q * threads).to(tl.int32)
    x = _one(seed, counter + (q >> 2), thread, q & 3, a, b, c, KIND, out.dtype.element_ty)
    tl.store(out + at, x, mask=ok & (index >= 0) & (index < size))


@triton.jit(do_not_specialize=_VARY)
def fill_columns(
    out, rows, width, first, size, stride, local_stride, threads, seed, counter, a, b, c,
    KIND: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPTURED: tl.constexpr,
):  # fmt: skip
    """A box of two dims, no wider than a launch: only one element of a row is looked up by a division."""
    seed, counter = _seed_and_counter(seed, counter, CAPTURED)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    if WIDE:
        row = row.to(tl.int64)
    start = first + row * stride
    q = start // threads
    thread = (start - q * threads).to(tl.int32) + column
    over = thread >= threads
    q = q + over.to(tl.int32)
    thread = tl.where(over, thread - threads, thread)
    index = start + column
    x = _one(seed, counter + (q >> 2), thread, q & 3, a, b, c, KIND, out.dtype.element_ty)
    ok = (row < rows) & (column < width) & (index >= 0) & (index < size)
    tl.store(out + row * local_stride + column, x, mask=ok)


# ---------------------------------------------------------------------------------------------------------------------
# native_dropout. SIDE elements that lie next to each other are a thread's.
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed", "counter", "keep", "scale"])
def dropout_run(
    x,
    out,
    mask,
    numel,
    begin,
    threads,
    seed,
    counter,
    keep,
    scale,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPTURED: tl.constexpr,
):
    """A run of elements, from ``begin`` on, four of a Philox call at a time."""
    seed, counter = _seed_and_counter(seed, counter, CAPTURED)
    SHARED: tl.constexpr = SIDE // 4  # how many vectors of four are a thread's
    vector = tl.arange(0, BLOCK)
    first = begin // 8 * 2 + tl.program_id(0).to(tl.int64) * BLOCK
    group = first // SHARED // threads
    thread = (first // SHARED - group * threads).to(tl.int32) + vector // SHARED
    over = thread >= threads
    call = (group + over.to(tl.int32)) * SHARED + vector % SHARED
    w0, w1, w2, w3 = _words(seed, counter + call, tl.where(over, thread - threads, thread))
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    i = first * 4 + tl.arange(0, BLOCK * 4) - begin
    ok = (i >= 0) & (i < numel)
    kept = _uniform(word) < keep
    value = tl.load(x + i, mask=ok).to(tl.float32) * kept.to(tl.float32) * scale
    tl.store(out + i, value.to(out.dtype.element_ty), mask=ok)
    tl.store(mask + i, kept, mask=ok)


@triton.jit(do_not_specialize=["seed", "counter", "keep", "scale"])
def dropout_box(
    x, out, mask, numel, n1, n2, first, g0, g1, l0, l1, threads, seed, counter, keep, scale,
    SIDE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CAPTURED: tl.constexpr,
):  # fmt: skip
    """A box of up to three dims, each element with a Philox call of its own."""
    seed, counter = _seed_and_counter(seed, counter, CAPTURED)
    ok, index, at = _box(n1, n2, numel, first, g0, g1, l0, l1, WIDE, BLOCK)
    q = index // SIDE
    group = q // threads
    thread = (q - group * threads).to(tl.int32)
    if SIDE == 1:
        lane = group % 4
        call = group // 4
    elif SIDE == 8:
        lane = index % 4
        call = group * 2 + index % 8 // 4
    else:
        lane = index % SIDE
        call = group
    w0, w1, w2, w3 = _words(seed, counter + call, thread)
    kept = _uniform(_pick(w0, w1, w2, w3, lane)) < keep
    value = tl.load(x + at, mask=ok).to(tl.float32) * kept.to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=ok)
    tl.store(mask + at, kept, mask=ok)


# ---------------------------------------------------------------------------------------------------------------------
# Which distributions, with which numbers.
# ---------------------------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Distribution(NamedTuple):
    """``kind`` of a kernel, with the numbers that its formula takes."""

    kind: Any
    a: Any
    b: Any
    c: Any


def _finite(*numbers: Any) -> bool:
    return all(math.isfinite(number) for number in numbers)


def _float32(value: float) -> float:
    return float(np.float32(value))


def _uniform_of(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution | None:
    if dtype not in FLOATS or not _finite(low, high) or low > high:
        return None
    start, end = torch.tensor([low, high], dtype=dtype, device="cpu")
    span = (end - start).item()  # in the dtype, as uniform_kernel subtracts
    return Distribution(UNIFORM, start.item(), span, end.item()) if _finite(span, start, end) else None


def _normal_of(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0, kind: Any = NORMAL) -> Distribution | None:
    if dtype not in FLOATS or not _finite(mean, std) or std < 0:
        return None
    return Distribution(kind, float(mean), float(std), 0.0)


def _log_normal_of(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Distribution | None:
    return _normal_of(dtype, mean, std, LOG_NORMAL) if std > 0 else None


def _exponential_of(dtype: torch.dtype, rate: float = 1.0) -> Distribution | None:
    if dtype not in FLOATS or not _finite(rate) or rate <= 0:
        return None
    return Distribution(EXPONENTIAL, float(np.float32(-1.0) / np.float32(rate)), 0.0, 0.0)


def _bernoulli_of(dtype: torch.dtype, p: float = 0.5) -> Distribution | None:
    if dtype not in (*FLOATS, *_INTS, torch.bool) or not 0 <= p <= 1:
        return None
    return Distribution(BERNOULLI, float(p), 0.0, 0.0)


def _random_of(dtype: torch.dtype, *bounds: int | None) -> Distribution | None:
    if len(bounds) == 1:
        bounds = (0, *bounds)
    if dtype not in (*FLOATS, *_INTS) or len(bounds) != 2 or bounds[1] is None:
        return None
    low, high = bounds
    digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
    largest = 1 << digits[dtype] if dtype in digits else torch.iinfo(dtype).max
    smallest = -largest if dtype in digits else torch.iinfo(dtype).min
    if not smallest <= low < high <= largest + 1 or high - low >= 1 << 28:  # type: ignore[operator]
        return None
    return Distribution(RANDOM, low, high - low, 0)  # type: ignore[operator]


_OF: dict[Any, Callable[..., Distribution | None]] = {
    torch.Tensor.uniform_: _uniform_of,
    torch.Tensor.normal_: _normal_of,
    torch.Tensor.log_normal_: _log_normal_of,
    torch.Tensor.exponential_: _exponential_of,
    torch.Tensor.bernoulli_: _bernoulli_of,
    torch.Tensor.random_: _random_of,
}


@functools.lru_cache(maxsize=4096)
def distribution_of(fill: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> Distribution | None:
    """What a kernel has to draw for ``fill`` with these arguments; None where there is no kernel for it, and where the
    arguments are none that the op takes."""
    return _OF[fill](dtype, *args) if fill in _OF else None


# ---------------------------------------------------------------------------------------------------------------------
# Launches.
# ---------------------------------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """Elements of the whole, with up to three sizes, their strides in the whole and in the local tensor, and where the
    first one is in both."""

    sizes: tuple[int, ...]
    whole_strides: tuple[int, ...]
    local_strides: tuple[int, ...]
    first: int
    local_first: int


_MOST_BOXES = 64


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _boxes(shard: ShardSlice) -> list[_Box] | None:
    """The boxes of a shard, dims merged where they can be; None where there are too many, or one has more than three."""
    if math.prod(map(len, shard.ranges)) > _MOST_BOXES:
        return None
    held = tuple(sum(stop - start for start, stop in ranges) for ranges in shard.ranges)
    whole_strides, local_strides = _row_major(shard.shape), _row_major(held)
    by_dim = []
    for ranges in shard.ranges:
        starts = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
        by_dim.append([(start, stop - start, at) for (start, stop), at in zip(ranges, starts)])
    boxes = []
    for parts in itertools.product(*by_dim):
        dims: list[tuple[int, int, int]] = []
        for (_, size, _), whole, local in zip(parts, whole_strides, local_strides):
            if size == 1:
                continue
            if dims and dims[-1][1:] == (whole * size, local * size):
                dims[-1] = (dims[-1][0] * size, whole, local)
            else:
                dims.append((size, whole, local))
        first = sum(start * stride for (start, _, _), stride in zip(parts, whole_strides))
        local_first = sum(at * stride for (_, _, at), stride in zip(parts, local_strides))
        dims = dims or [(1, 1, 1)]
        if dims[-1][1:] != (1, 1):
            dims.append((1, 1, 1))
        if len(dims) > 3:
            return None
        sizes, of_whole, of_local = zip(*dims)
        boxes.append(_Box(sizes, of_whole, of_local, first, local_first))
    return boxes


class _Launch(NamedTuple):
    """A kernel, its grid, where its output begins in the local tensor, what it takes before the seed, the offset of its
    part of the stream, and its constants."""

    kernel: Any
    grid: tuple[int, ...]
    local_first: int
    before: tuple[int, ...]
    offset: int
    constants: dict[str, Any]

    def of(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors from where this launch begins."""
        return tuple(one.view(-1)[self.local_first :] for one in tensors) if self.local_first else tensors


class _Runner:
    """Launches of one kernel with one set of types: what Triton compiled is kept here, as its own look-up takes longer than
    a launch."""

    __slots__ = ("constants", "launch", "runs")

    def __init__(self, launch: _Launch, **constants: Any):
        self.launch = launch
        self.constants = {**constants, **launch.constants, "CAPTURED": -1}
        self.runs: dict[Any, Any] = {}

    def __call__(self, tensors: tuple[torch.Tensor, ...], seed: int, counter: int, *numbers: Any) -> None:
        launch = self.launch
        if launch.local_first:
            tensors = launch.of(*tensors)
        # What Triton compiles for: pointers to whole vectors, and integers of 32 bits.
        aligned = 0
        for one in tensors:
            aligned |= one.data_ptr() & 15
        key = (aligned == 0, -_INT32 <= seed < _INT32, counter < _INT32)
        args = (*tensors, *launch.before, seed, counter, *numbers)
        run = self.runs.get(key)
        if run is None:
            self.runs[key] = launch.kernel[launch.grid](*args, **self.constants)[launch.grid]
        else:
            run(*args, *self.constants.values())

    def capture(
        self, tensors: tuple[torch.Tensor, ...], seed: torch.Tensor, offset: torch.Tensor, *numbers: Any
    ) -> None:
        """The launch in a CUDA graph, at the seed and offset that are on the device when it runs."""
        launch = self.launch
        args = (*launch.of(*tensors), *launch.before, seed, offset, *numbers)
        launch.kernel[launch.grid](*args, **{**self.constants, "CAPTURED": launch.offset // 4})


_INT32 = 1 << 31
_RUN_BLOCK = 1024
_BOX_BLOCK = 512
_COLUMNS_BLOCK = (8, 128)
_DROPOUT_BLOCK = 512


def _run_launch(
    begin: int, numel: int, leaf_offset: int, launched: int, local_first: int, row: int, width: int, column: int
) -> _Launch:
    rows = row == width
    held = launched if rows else launched // row * width
    group = 4 * held
    first_group = begin // group
    return _Launch(
        fill_run,
        (triton.cdiv(held, _RUN_BLOCK), (begin + numel - 1) // group - first_group + 1, 1),
        local_first,
        (numel, begin, first_group, launched, row, width, column),
        leaf_offset,
        {"ROWS": rows, "BLOCK": _RUN_BLOCK},
    )


@functools.lru_cache(maxsize=1024)
def fill_launches(shard: ShardSlice, element_size: int, most_threads: int) -> tuple[tuple[_Launch, ...], int] | None:
    """The launches that fill a shard with 32-bit values, and how far the generator advances; None where replay serves."""
    boxes = _boxes(shard)
    if boxes is None:
        return None
    stream: Stream = stream_of(shard.numel, element_size, most_threads, 4)
    launches = []
    for leaf in stream.leaves:
        size = leaf.end - leaf.begin
        launched = threads(size, most_threads)
        for box in boxes:
            if len(box.sizes) == 1:
                low = max(box.first, leaf.begin)
                high = min(box.first + box.sizes[0], leaf.end)
                if low < high:
                    at = box.local_first + low - box.first
                    launches.append(_run_launch(low - leaf.begin, high - low, leaf.offset, launched, at, 1, 1, 0))
                continue
            # The rows of the first dim that reach into the leaf.
            stride, local_stride = box.whole_strides[0], box.local_strides[0]
            reach = 1 + sum((n - 1) * one for n, one in zip(box.sizes[1:], box.whole_strides[1:]))
            first_row = max(0, -((box.first + reach - 1 - leaf.begin) // stride))
            rows = min(box.sizes[0], -(-(leaf.end - box.first) // stride)) - first_row
            if rows <= 0:
                continue
            first = box.first + first_row * stride - leaf.begin
            at = box.local_first + first_row * local_stride
            *_, width = box.sizes
            if (
                len(box.sizes) == 2
                and local_stride == width
                and launched % stride == 0
                and first >= 0
                and first % stride + width <= stride
                and first + (rows - 1) * stride + width <= size
            ):
                begin, column = first // stride * width, first % stride
                launches.append(_run_launch(begin, rows * width, leaf.offset, launched, at, stride, width, column))
                continue
            if len(box.sizes) == 2 and width <= launched:
                before = (rows, width, first, size, stride, local_stride, launched)
                grid = (*(triton.cdiv(n, block) for n, block in zip((rows, width), _COLUMNS_BLOCK)), 1)
                wide = max(first + rows * stride, rows * local_stride) >= 1 << 31
                constants = {"WIDE": wide, "ROWS": _COLUMNS_BLOCK[0], "COLUMNS": _COLUMNS_BLOCK[1]}
                launches.append(_Launch(fill_columns, grid, at, before, leaf.offset, constants))
                continue
            sizes, whole, local = (rows, *box.sizes[1:]), box.whole_strides, box.local_strides
            launches.append(_box_launch(fill_box, sizes, whole, local, first, (size,), launched, leaf.offset, at))
    return tuple(launches), stream.end


def _box_launch(
    kernel: Any,
    sizes: tuple[int, ...],
    whole: tuple[int, ...],
    local: tuple[int, ...],
    first: int,
    size: tuple[int, ...],
    launched: int,
    offset: int,
    at: int,
) -> _Launch:
    if len(sizes) == 2:
        sizes, whole, local = (1, *sizes), (0, *whole), (0, *local)
    numel = math.prod(sizes)
    last = first + sum((n - 1) * stride for n, stride in zip(sizes, whole))
    return _Launch(
        kernel,
        (triton.cdiv(numel, _BOX_BLOCK), 1, 1),
        at,
        (numel, *sizes[1:], first, *size, *whole[:2], *local[:2], launched),
        offset,
        {"WIDE": max(last, numel) >= 1 << 31, "BLOCK": _BOX_BLOCK},
    )


class Filler:
    """Fills the contiguous local tensors of a shard, of one dtype, from a distribution."""

    __slots__ = ("_numbers", "_runners", "end")

    def __init__(self, distribution: Distribution, launches: tuple[_Launch, ...], end: int):
        kind, *self._numbers = distribution
        self._runners = [(launch.offset, _Runner(launch, KIND=kind)) for launch in launches]
        self.end = end

    def __call__(self, target: torch.Tensor, generator: torch.Generator) -> None:
        """Fills ``target``, which is on the current device, and advances the generator."""
        base, seed = generator.get_offset(), _signed(generator.initial_seed())
        for offset, run in self._runners:
            run((target,), seed, (base + offset) // 4, *self._numbers)
        generator.set_offset(base + self.end)

    def capture(self, target: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> None:
        """Fills ``target`` in a CUDA graph, at the seed and offset on the device, and moves no generator."""
        for _, run in self._runners:
            run.capture((target,), seed, offset, *self._numbers)


def filler(distribution: Distribution, shard: ShardSlice, element_size: int, most_threads: int) -> Filler | None:
    """None where no kernel serves the shard."""
    found = fill_launches(shard, element_size, most_threads)
    return None if found is None else Filler(distribution, *found)


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


@functools.lru_cache(maxsize=1024)
def dropout_launches(shard: ShardSlice, side: int, most_threads: int) -> tuple[_Launch, ...] | None:
    """The launches that draw a shard's mask, ``side`` elements next to each other being a thread's."""
    boxes = _boxes(shard)
    if boxes is None:
        return None
    launched = threads(shard.numel, most_threads)
    launches = []
    for box in boxes:
        if len(box.sizes) == 1 and side >= 4:
            numel = box.sizes[0]
            vectors = (box.first + numel - 1) // 4 - box.first // 8 * 2 + 1
            grid = (triton.cdiv(vectors, _DROPOUT_BLOCK), 1, 1)
            constants = {"SIDE": side, "BLOCK": _DROPOUT_BLOCK}
            launches.append(_Launch(dropout_run, grid, box.local_first, (numel, box.first, launched), 0, constants))
            continue
        sizes, whole, local = box.sizes, box.whole_strides, box.local_strides
        if len(sizes) == 1:
            sizes, whole, local = (1, *sizes), (0, *whole), (0, *local)
        one = _box_launch(dropout_box, sizes, whole, local, box.first, (), launched, 0, box.local_first)
        launches.append(one._replace(constants={"SIDE": side, **one.constants}))
    return tuple(launches)


class Dropper:
    """Drops out of the contiguous local tensors of a shard, of one dtype, with probability ``p``."""

    __slots__ = ("_numbers", "_runners", "end")

    def __init__(self, p: float, launches: tuple[_Launch, ...], end: int):
        keep = _float32(1.0 - p)
        self._numbers = keep, _float32(1.0 / keep)
        self._runners = [_Runner(launch) for launch in launches]
        self.end = end

    def __call__(self, x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept of ``x``, which is on the current device, and the mask; advances the generator."""
        base, seed = generator.get_offset(), _signed(generator.initial_seed())
        outs = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
        for run in self._runners:
            run((x, *outs), seed, base // 4, *self._numbers)
        generator.set_offset(base + self.end)
        return outs

    def capture(self, x: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in a CUDA graph, at the seed and offset on the device; moves no generator."""
        outs = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
        for run in self._runners:
            run.capture((x, *outs), seed, offset, *self._numbers)
        return outs


def dropper(shard: ShardSlice, dtype: torch.dtype, p: float, side: int, most_threads: int) -> Dropper | None:
    """None where no kernel serves the shard. ``side`` elements next to each other are a thread's."""
    launches = dropout_launches(shard, side, most_threads) if dtype in FLOATS else None
    return None if launches is None else Dropper(p, launches, advance(shard.numel, most_threads, 4))
