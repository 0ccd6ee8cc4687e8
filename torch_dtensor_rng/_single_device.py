"""Policy ``single_device``: a shard gets the numbers that the plain call gives to its elements on one device.

CPU: the stock op runs over the whole tensor on the live generator, and the rank keeps its part. Where the kernel draws
element after element this is done a window at a time, in bounded scratch memory.

CUDA: the place of an element in the Philox stream is a function of its index in memory order and of the size of the
whole (``distribution_nullary_kernel`` in ATen/native/cuda/DistributionTemplates.h): in *groups* of as many elements as
the launch has threads, times the values of a Philox call, each group 4 offsets further. So the stock op over a window
of whole groups, at the offset of the first, draws what it draws there over the whole.

Nothing here communicates. If anything raises, the generator is where it was before, unless a CUDA graph is captured.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._capture import capturing, reserve
from ._draw import default_generator, try_on_one_element
from ._ops import BERNOULLI, RandomOp, apply_mask
from ._shard import ShardSlice, held_in, overlaps, runs_of
from ._stream import Stream, advance, most_threads_of, side_by_side, stream_of, threads

aten = torch.ops.aten


def draw(
    row: RandomOp, shard: ShardSlice | None, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs ``row``, which has a ``fill``, on ``local``, which holds ``shard`` of the op's output; None is all of it.
    Does not communicate.

    Raises:
        RuntimeError: the generator is of another device type than ``local``, or the kernel of this torch lays its
            numbers out in an order that is not known here.
    """
    generator = kwargs.get("generator")
    if shard is None:
        return row.call(local, *args, **kwargs)
    dropout = row.reads_input
    out = local
    if not row.in_place and not dropout:
        out = torch.empty_like(local, **{name: value for name, value in kwargs.items() if name != "generator"})
    if local.is_cuda:
        device = local.get_device()
        fused = shard.ready.get((row.overload, out.dtype, device, args))
        if (
            fused is not None
            and out.is_contiguous()
            and torch.cuda.current_device() == device
            and not torch.cuda.is_current_stream_capturing()
        ):
            if generator is None:
                generator = torch.cuda.default_generators[device]
            else:
                default_generator(generator, local.device)
            drawn = fused(out, generator)  # which moves the generator last
            return drawn if dropout else out
    generator = default_generator(generator, local.device)
    if local.is_cuda and capturing(local.device):
        return _capture(row, shard, out, args, generator)
    if not local.numel() and shard.numel:
        try_on_one_element(row, local, args, kwargs)
    restore = _restore_point(generator)
    try:
        if dropout:
            return _dropout(row, shard, local, args[0], args[1], generator)
        if shard.numel:
            _fill(row, shard, out, args, generator)
        return out
    except BaseException:
        restore()
        raise


def _restore_point(generator: torch.Generator) -> Callable[[], object]:
    """What puts the generator back to where it is now."""
    if generator.device.type == "cpu":
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(generator.set_offset, generator.get_offset())


def _fill(
    row: RandomOp, shard: ShardSlice, out: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator
) -> None:
    target = out.permute(shard.order)
    if out.is_cpu:
        if shard.is_contiguous and _draws_one_after_another(row, out.dtype, args):
            _in_windows(row, shard, target, args, generator)
        else:
            _as_a_whole(row, shard, target, args, generator)
        return
    if out.dtype.is_complex or not shard.is_dense:  # TensorIterator splits these where they need more than 32 bits
        _as_a_whole(row, shard, target, args, generator)
        return
    in_order = target if target.is_contiguous() else torch.empty(target.shape, dtype=out.dtype, device=out.device)
    fused = _fused_fill(row, shard, in_order, args)
    if fused is not None:
        with torch.cuda.device(out.device):
            fused(in_order, generator)
        if shard.order == tuple(range(out.ndim)):
            _keep_ready(row, shard, in_order, args, fused)
    else:
        values = 2 if row.wide(out.dtype, *args) else 4
        _check(row, out.dtype, out.device, args, values)
        stream = stream_of(shard.numel, out.element_size(), most_threads_of(out.device), values)
        base = generator.get_offset()
        _replay_shard(functools.partial(_replay, row, args, generator, base, stream), shard, stream, in_order)
        generator.set_offset(base + stream.end)
    if in_order is not target:
        target.copy_(in_order)


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    """The fused kernels; None without Triton."""
    try:
        from . import _kernels
    except ImportError:
        return None
    return _kernels


def _fused_fill(row: RandomOp, shard: ShardSlice, in_order: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """The fused kernel that fills the shard; None where there is none."""
    kernels = _kernels()
    if kernels is None:
        return None
    distribution = kernels.distribution_of(row.fill, in_order.dtype, args)
    if distribution is None or not _fused_is_exact(kernels, row, distribution, in_order.dtype, in_order.device, args):
        return None
    return kernels.filler(distribution, shard, in_order.element_size(), most_threads_of(in_order.device))


_MOST_READY = 64


def _keep_ready(row: RandomOp, shard: ShardSlice, out: torch.Tensor, args: tuple[Any, ...], fused: Any) -> None:
    if len(shard.ready) >= _MOST_READY:  # as where a parameter changes with every step
        shard.ready.clear()
    shard.ready[row.overload, out.dtype, out.get_device(), args] = fused


def _as_a_whole(
    row: RandomOp, shard: ShardSlice, target: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator
) -> None:
    """Draws the whole tensor, which is right by its definition, and keeps the shard. ``target`` is in memory order."""
    whole = torch.empty_strided(shard.shape, shard.stride, dtype=target.dtype, device=target.device)
    # The dims of the whole in its own order, as a kernel may ask whether it is contiguous.
    row.fill(whole.permute(_inverse(shard.order)), *args, generator=generator)  # type: ignore[misc]
    for of_whole, of_local in overlaps(shard, tuple((0, size) for size in shard.shape)):
        target[of_local] = whole[of_whole]


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


# ---------------------------------------------------------------------------------------------------------------------
# CPU.
# ---------------------------------------------------------------------------------------------------------------------

# A vectorised normal_() works on blocks of 16 (normal_fill in ATen/native/cpu/DistributionTemplates.h).
_BLOCK = 16
_WINDOW = 1 << 20


def _windows(numel: int, window: int) -> Iterator[tuple[int, int]]:
    """Windows of ``window`` elements; the last one takes what would be less than a block."""
    begin = 0
    while begin < numel:
        end = begin + window
        end = end if end + _BLOCK <= numel else numel
        yield begin, end
        begin = end


def _in_windows(
    row: RandomOp,
    shard: ShardSlice,
    target: torch.Tensor,
    args: tuple[Any, ...],
    generator: torch.Generator,
    window: int = _WINDOW,
) -> None:
    scratch = torch.empty(min(shard.numel, window + _BLOCK), dtype=target.dtype)
    for begin, end in _windows(shard.numel, window):
        drawn = row.fill(scratch[: end - begin], *args, generator=generator)  # type: ignore[misc]
        _keep(shard, drawn, begin, target)


def _keep(shard: ShardSlice, drawn: torch.Tensor, begin: int, target: torch.Tensor) -> None:
    """Copies what the shard holds of ``drawn``, the elements of the whole from ``begin`` on."""
    for held in held_in(shard, begin, begin + drawn.numel()):
        target[held.of_local] = held.of(drawn)


@functools.lru_cache(maxsize=256)
def _draws_one_after_another(row: RandomOp, dtype: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Whether the kernel over windows draws what it draws over the whole, seen on a small tensor."""
    sizes = (5 * _BLOCK, 3)
    shard = ShardSlice((0, 1), sizes, (3, 1), (((0, sizes[0]),), ((0, 3),)))
    outs, ends = [], []
    for fill in (_as_a_whole, functools.partial(_in_windows, window=_BLOCK)):
        generator = torch.Generator().manual_seed(0)
        out = torch.empty(sizes, dtype=dtype)
        fill(row, shard, out, args, generator)
        outs.append(out.view(torch.uint8))
        ends.append(generator.get_state())
    return torch.equal(*outs) and torch.equal(*ends)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA: where the stock kernels draw, as plain functions, and replay.
# ---------------------------------------------------------------------------------------------------------------------

_SCRATCH_BYTES = 1 << 25
_FILL_BYTES = 1 << 30


def _replay(
    row: RandomOp,
    args: tuple[Any, ...],
    generator: torch.Generator,
    base: int,
    stream: Stream,
    begin: int,
    end: int,
    into: torch.Tensor,
) -> None:
    """Draws the elements [begin, end) of the whole into ``into``, a contiguous tensor of as many."""
    fill: Callable[..., Any] = row.fill  # type: ignore[assignment]
    for leaf in stream.leaves:
        size, group = leaf.end - leaf.begin, stream.group(leaf)
        launched = threads(size, stream.most_threads)
        low, high = max(begin, leaf.begin) - leaf.begin, min(end, leaf.end) - leaf.begin
        step = max(1, _FILL_BYTES // into.element_size() // group) * group  # what is filled at once must not be split
        while low < high:
            first = low - low % group
            stop = min(high, low + step if low == first else first + group)
            if stop > first + group and stop != size:
                stop -= stop % group  # whole groups, and then what is left
            part = into[low + leaf.begin - begin : stop + leaf.begin - begin]
            generator.set_offset(base + leaf.offset + first // group * 4)
            whole = low == first and (stop % group == 0 or stop == size)
            if whole and threads(stop - low, stream.most_threads) == launched:
                fill(part, *args, generator=generator)
            else:
                # As many elements as launch with the threads of the whole.
                numel = max(min(size, first + group) - first, launched)
                scratch = torch.empty(numel, dtype=into.dtype, device=into.device)
                part.copy_(fill(scratch, *args, generator=generator)[low - first : stop - first])
            low = stop


def _replay_shard(replay: Callable[..., None], shard: ShardSlice, stream: Stream, target: torch.Tensor) -> None:
    """Draws the shard into ``target``, which is contiguous."""
    largest = max(stream.group(leaf) for leaf in stream.leaves)
    shortest, runs = runs_of(shard)
    if shortest >= largest or shortest >= target.numel():
        flat, at = target.view(-1), 0
        for begin, end in runs:
            replay(begin, end, flat[at : at + end - begin])
            at += end - begin
        return
    window = max(1, _SCRATCH_BYTES // target.element_size() // largest) * largest
    scratch = torch.empty(min(window, shard.numel), dtype=target.dtype, device=target.device)
    for leaf in stream.leaves:
        for begin in range(leaf.begin, leaf.end, window):
            drawn = scratch[: min(leaf.end - begin, window)]
            if held_in(shard, begin, begin + drawn.numel()):
                replay(begin, begin + drawn.numel(), drawn)
                _keep(shard, drawn, begin, target)


# ---------------------------------------------------------------------------------------------------------------------
# native_dropout, which reads a tensor and returns two.
# ---------------------------------------------------------------------------------------------------------------------


def _dropout(
    row: RandomOp, shard: ShardSlice, local: torch.Tensor, p: float, train: bool | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or not shard.numel or (p == 1 and local.is_cuda):  # whose kernel is not run
        return row.call(local, p, train)
    if not shard.is_contiguous:
        return _dropout_of_whole(row, shard, local, p, train, generator)
    if local.is_cpu:
        mask = torch.empty_like(local, dtype=torch.bool)
        _fill(BERNOULLI, shard, mask, (1.0 - p,), generator)
        return apply_mask(local, mask, 1.0 - p)
    fused = _fused_dropout(row, shard, local, p)
    if fused is not None:
        with torch.cuda.device(local.device):
            outs = fused(local, generator)
        _keep_ready(row, shard, local, (p, train), fused)
        return outs
    _check_dropout(row, local.dtype, local.device)
    return _replay_dropout(row, shard, local, p, train, generator)


def _fused_dropout(row: RandomOp, shard: ShardSlice, local: torch.Tensor, p: float) -> Any:
    """The fused kernel that drops out of the shard; None where there is none."""
    kernels = _kernels()
    if kernels is None or not local.is_contiguous():
        return None
    if not _fused_dropout_is_exact(kernels, row, local.dtype, local.device):
        return None
    side = side_by_side(shard.numel, local.element_size())
    return kernels.dropper(shard, local.dtype, p, side, most_threads_of(local.device))


def _dropout_of_whole(
    row: RandomOp, shard: ShardSlice, local: torch.Tensor, p: float, train: bool | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    everything = overlaps(shard, tuple((0, size) for size in shard.shape))
    whole = torch.empty_strided(shard.shape, shard.stride, dtype=local.dtype, device=local.device).zero_()
    for of_whole, of_local in everything:
        whole[of_whole] = local.permute(shard.order)[of_local]
    kwargs = {"generator": generator} if local.is_cpu else {}
    drawn = row.call(whole.permute(_inverse(shard.order)), p, train, **kwargs)
    outs = tuple(torch.empty_like(local, dtype=one.dtype) for one in drawn)
    for out, one in zip(outs, drawn):
        for of_whole, of_local in everything:
            out.permute(shard.order)[of_local] = one.permute(shard.order)[of_whole]
    return outs  # type: ignore[return-value]


# A group of 8 elements a thread is the same, whether a thread takes 8 or 4 that lie next to each other, or 4 that lie as
# those of other kernels do (fused_dropout_kernel_vec and fused_dropout_kernel in ATen/native/cuda/Dropout.cu).
_DROPOUT_VALUES = 8
# How many lie next to each other depends on what divides the number of elements (get_vector_size, there).
_DROPOUT_DIVISOR = 16


def _dropout_offsets(numel: int, element_size: int) -> int:
    """How many offsets a group lies after the one before it: 4 for 4 elements. Where a thread takes 2 that lie next to
    each other it makes a Philox call for these and throws half of it away, as its ``gridxvec_loop_state`` never flips; so
    it reads twice as far as it advances the generator."""
    return 4 * _DROPOUT_VALUES // (2 if side_by_side(numel, element_size) == 2 else 4)


def _replay_dropout(
    row: RandomOp,
    shard: ShardSlice,
    local: torch.Tensor,
    p: float,
    train: bool | None,
    generator: torch.Generator,
    scratch_bytes: int = _SCRATCH_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    base, numel, most = generator.get_offset(), shard.numel, most_threads_of(local.device)
    launched = threads(numel, most)
    group = launched * _DROPOUT_VALUES
    window = max(1, scratch_bytes // local.element_size() // group) * group
    offsets = _dropout_offsets(numel, local.element_size())
    outs = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
    for begin in range(0, numel, window):
        held = held_in(shard, begin, min(numel, begin + window))
        if not held:
            continue
        size = max(min(numel - begin, window), launched)
        x = torch.zeros(size + (numel - size) % _DROPOUT_DIVISOR, dtype=local.dtype, device=local.device)
        for one in held:
            one.of(x).copy_(local.permute(shard.order)[one.of_local])
        generator.set_offset(base + begin // group * offsets)
        for out, drawn in zip(outs, row.call(x, p, train)):
            for one in held:
                out.permute(shard.order)[one.of_local] = one.of(drawn)
    generator.set_offset(base + advance(numel, most, 4))
    return outs


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs: the fused kernels, at a seed and an offset that the graph keeps on the device.
# ---------------------------------------------------------------------------------------------------------------------


def _capture(
    row: RandomOp, shard: ShardSlice, out: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator
) -> Any:
    """:func:`draw` while a CUDA graph is captured. A generator other than the default one has to be known to the graph."""
    with torch.cuda.device(out.device):
        if row.reads_input:
            p, train = args
            if train is False or not shard.numel or p == 1:  # as in _dropout
                return row.call(out, p, train)
            fused = _fused_dropout(row, shard, out, p) if shard.is_contiguous else None
            if fused is not None:
                return fused.capture(out, *reserve(generator, fused.end))
            _warn_of_whole(row, shard)
            return _dropout_of_whole(row, shard, out, p, train, generator)
        if not shard.numel:
            return out
        target = out.permute(shard.order)
        in_order = target if target.is_contiguous() else torch.empty(target.shape, dtype=out.dtype, device=out.device)
        fused = _fused_fill(row, shard, in_order, args) if shard.is_dense and not out.dtype.is_complex else None
        if fused is not None:
            fused.capture(in_order, *reserve(generator, fused.end))
            if in_order is not target:
                target.copy_(in_order)
        else:
            _warn_of_whole(row, shard)
            _as_a_whole(row, shard, target, args, generator)
        return out


def _warn_of_whole(row: RandomOp, shard: ShardSlice) -> None:
    warnings.warn(
        f"{row.op}: this CUDA graph draws the whole tensor, of shape {tuple(shard.shape)}, to keep a shard of it: there is "
        "no fused kernel for the dtype or the layout, or the op has not run before the capture. Run it once before.",
        stacklevel=2,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Whether the kernels of this torch do so: looked at once for each op and dtype of a device.
# ---------------------------------------------------------------------------------------------------------------------

_checked: set[Any] = set()
_fused: dict[Any, bool] = {}  # whether a fused kernel draws what the stock one does


def forget() -> None:
    """Forgets which kernels have been looked at."""
    _checked.clear()
    _fused.clear()


def _check_shards(most: int) -> tuple[int, list[ShardSlice]]:
    """A number of elements, two groups and more, and shards of as many in all layouts that the fused kernels know: a run,
    columns that divide a launch and columns that do not, and a box."""
    numel = 3 * 256 * 125 * (10 * most // (3 * 256 * 125))
    shards = []
    for sizes in ((numel,), (numel // 256, 256), (numel // 250, 250), (numel // 768, 3, 256)):
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        held = tuple(((size // 3, size - size // 5),) for size in sizes)
        shards.append(ShardSlice(tuple(range(len(sizes))), sizes, strides, held))
    return numel, shards


def _part(whole: torch.Tensor, shard: ShardSlice) -> torch.Tensor:
    return whole.view(shard.shape)[tuple(slice(*ranges[0]) for ranges in shard.ranges)]


def _fused_is_exact(
    kernels: Any, row: RandomOp, distribution: Any, dtype: torch.dtype, device: torch.device, args: tuple[Any, ...]
) -> bool:
    key = (row.fill, dtype, device)
    if key not in _fused:
        if capturing(device):  # which allows no comparison
            return False
        generator = torch.Generator(device).manual_seed(0)
        most = most_threads_of(device)
        numel, shards = _check_shards(most)
        whole = torch.empty(numel, dtype=dtype, device=device)
        row.fill(whole, *args, generator=generator)  # type: ignore[misc]
        end = generator.get_offset()
        _fused[key] = True
        for shard in shards:
            generator.set_offset(0)
            part = _part(whole, shard)
            drawn = torch.empty_like(part, memory_format=torch.contiguous_format)
            with torch.cuda.device(device):
                kernels.filler(distribution, shard, drawn.element_size(), most)(drawn, generator)
            if generator.get_offset() != end or not _same_bits(drawn, part.contiguous()):
                _fused[key] = False
        _warn_unless_fused(key, row)
    return _fused[key]


def _fused_dropout_is_exact(kernels: Any, row: RandomOp, dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in kernels.FLOATS:
        return False
    key = (row.fill, dtype, device)
    if key not in _fused:
        if capturing(device):
            return False
        generator = default_generator(None, device)
        base, most = generator.get_offset(), most_threads_of(device)
        numel, shards = _check_shards(most)
        x = torch.ones(numel, dtype=dtype, device=device)
        try:
            wholes = row.call(x, 0.3, True)
            end = generator.get_offset()
            _fused[key] = True
            for shard in shards:
                generator.set_offset(base)
                drop = kernels.dropper(shard, dtype, 0.3, side_by_side(numel, x.element_size()), most)
                with torch.cuda.device(device):
                    outs = drop(_part(x, shard).contiguous(), generator)
                same = all(_same_bits(out, _part(whole, shard).contiguous()) for out, whole in zip(outs, wholes))
                if not same or generator.get_offset() != end:
                    _fused[key] = False
        finally:
            generator.set_offset(base)
        _warn_unless_fused(key, row)
    return _fused[key]


def _warn_unless_fused(key: Any, row: RandomOp) -> None:
    if not _fused[key]:
        warnings.warn(
            f"{row.op}: the fused kernel of torch_dtensor_rng does not draw what torch {torch.__version__} draws for "
            f"{key[1]} on {torch.cuda.get_device_name(key[2])}; the stock kernel is replayed, which is slower.",
            stacklevel=2,
        )


def _check(row: RandomOp, dtype: torch.dtype, device: torch.device, args: tuple[Any, ...], values: int) -> None:
    key = (row.overload, dtype, device, values)
    if key in _checked:
        return
    generator = torch.Generator(device).manual_seed(0)
    stream = stream_of(*_check_sizes(dtype, device, values))
    group = stream.group(stream.leaves[0])
    whole = torch.empty(stream.leaves[0].end, dtype=dtype, device=device)
    row.fill(whole, *args, generator=generator)  # type: ignore[misc]
    end = generator.get_offset()
    part = whole.new_empty(whole.numel() - group // 2)
    _replay(row, args, generator, 0, stream, group // 2, whole.numel(), part)
    if end != stream.end or not _same_bits(part, whole[group // 2 :]):
        raise _unknown(row, dtype, device)
    _checked.add(key)


def _check_dropout(row: RandomOp, dtype: torch.dtype, device: torch.device) -> None:
    key = (row.overload, dtype, device)
    if key in _checked:
        return
    generator = default_generator(None, device)
    base = generator.get_offset()
    numel, _, most, values = _check_sizes(dtype, device, _DROPOUT_VALUES)
    try:
        for n in (numel, numel + 4, numel + 2, numel + 1):
            x = torch.ones(n, dtype=dtype, device=device)
            wholes = row.call(x, 0.5, True)
            end = generator.get_offset()
            generator.set_offset(base)
            begin = most * values // 2
            shard = ShardSlice((0,), (n,), (1,), (((begin, n),),))
            parts = _replay_dropout(row, shard, x[begin:], 0.5, True, generator, scratch_bytes=0)
            same = all(_same_bits(part, whole[begin:]) for part, whole in zip(parts, wholes))
            if not same or end != generator.get_offset():
                raise _unknown(row, dtype, device)
            generator.set_offset(base)
    finally:
        generator.set_offset(base)
    _checked.add(key)


def _check_sizes(dtype: torch.dtype, device: torch.device, values: int) -> tuple[int, int, int, int]:
    """Two groups, and a last one that is not full: the arguments of :func:`stream_of`."""
    most = most_threads_of(device)
    return (2 * values + 1) * most + 16 * 21, dtype.itemsize, most, values


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _unknown(row: RandomOp, dtype: torch.dtype, device: torch.device) -> RuntimeError:
    return RuntimeError(
        f"{row.op}: torch {torch.__version__} lays the numbers of {dtype} tensors on {torch.cuda.get_device_name(device)} "
        "out in an order that torch_dtensor_rng does not know, so that policy 'single_device' cannot draw a shard's. "
        "Use install(policy='offset'), and report it."
    )
