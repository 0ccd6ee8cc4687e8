"""DTensor random ops on the live generator.

This file is a drop-in replacement for ``torch/distributed/tensor/_random.py`` of torch 2.11 to 2.15: it imports torch
only, keeps the names that torch and its users import, and works both inside this package and copied over torch's file.

A random op on a DTensor runs inside a *region*, a context manager around the local op:

- On a Philox device (CUDA and its kin) the region reads the generator's offset, moves it to the shard's place, and on
  exit moves it to one place that is the same on every rank. No state tensor is read or written.
- On the CPU, where the mt19937 engine has no offset to shift, the region draws one 64-bit key from the generator, and
  the local op runs on a state that is a strong mix of (key, shard index).

Nothing is forked, cached, broadcast or gathered. If the local op raises, the generator is where it was before the call.
"""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import enabled_local_tensor_mode, maybe_run_for_local_tensor
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "OffsetBasedRNGTracker",
    "is_rng_supported_mesh",
    "manual_seed",
]

_rng_tracker: "_RNGStateTracker | None" = None


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether DTensor's random ops are supported on the devices of ``device_mesh``.

    True for CPU meshes and for devices whose generators can be read and set (CUDA and its kin). Does not communicate.

    Args:
        device_mesh (:class:`DeviceMesh`): the mesh whose device type is looked at.
    """
    if device_mesh.device_type == "cpu" or hasattr(_get_device_handle(device_mesh.device_type), "set_rng_state"):
        return True
    warnings.warn(
        f"DTensor random operators may not have complete support on {device_mesh.device_type} device mesh",
        stacklevel=2,
    )
    return False


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seeds the calling rank's default generators, as :func:`torch.manual_seed` does. Does not communicate.

    DTensor keeps no generator state of its own, so this is :func:`torch.manual_seed` with a check that the calling rank
    is part of ``device_mesh``. Every rank that shares a DTensor has to pass the same seed.

    Args:
        seed (int): the desired seed.
        device_mesh (:class:`DeviceMesh`): a mesh that the calling rank is part of; any device type.

    Raises:
        RuntimeError: the calling rank is not part of ``device_mesh``.
    """
    if not is_rng_supported_mesh(device_mesh):
        return
    if device_mesh.get_coordinate() is None:
        raise RuntimeError(
            "manual_seed requires the current rank to be a part of the device mesh "
            "otherwise DTensor RNG state on the rank will not be initialized and "
            "the behavior of DTensor random ops is undefined."
        )
    global _rng_tracker
    if _rng_tracker is None:
        _rng_tracker = OffsetBasedRNGTracker(device_mesh)
    torch.manual_seed(seed)


class _PhiloxState:
    """Reads and writes (seed: uint64, offset: int64) in a Philox generator's 16-byte state tensor, a CPU uint8 tensor.

    Kept for torch's own callers (``run_dtensor_rng_op``, LocalTensorMode); the region itself needs no state tensor.
    """

    def __init__(self, state: torch.Tensor):
        self._state = state.to("cpu")

    @property
    def state(self) -> torch.Tensor:
        return self._state

    @property
    def offset(self) -> torch.Tensor:
        return self._state[8:].view(dtype=torch.int64)

    @offset.setter
    def offset(self, offset: torch.Tensor) -> None:
        if offset.numel() != 1:
            raise AssertionError
        self._state[8:] = offset.view(torch.uint8)

    @property
    def seed(self) -> torch.Tensor:
        return self._state[:8].view(dtype=torch.uint64)

    @seed.setter
    def seed(self, seed: torch.Tensor) -> None:
        if seed.numel() != 1:
            raise AssertionError
        self._state[:8] = seed.view(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Where a shard draws: plain functions of shapes, placements and coordinates.
# ---------------------------------------------------------------------------------------------------------------------


class _ShardPlan(NamedTuple):
    """Where one rank's shard of a DTensor draws.

    ``index`` of ``num_shards`` counts the distinct shards, row-major; ``start`` and ``end`` are Philox offsets relative
    to the generator's, both multiples of 4: where this shard begins, and where every rank ends.
    """

    index: Any
    num_shards: int
    start: Any
    end: Any


class _ShardLayout(NamedTuple):
    """Where all shards of a DTensor draw; the same on every rank.

    A shard's index is the sum of its mesh coordinate times ``weights``, one a mesh dim, 0 where it does not shard.
    ``step`` is the Philox offset span of a shard, ``end`` that of all.
    """

    weights: tuple[int, ...]
    num_shards: int
    step: Any
    end: Any

    def plan(self, mesh_coordinate: Sequence[Any]) -> _ShardPlan:
        index: Any = 0
        for weight, coordinate in zip(self.weights, mesh_coordinate):
            if weight:
                index = index + coordinate * weight
        return _ShardPlan(index, self.num_shards, _round_up_to_4(index * self.step), self.end)


def _round_up_to_4(value: Any) -> Any:
    # A Philox generator takes only multiples of 4 as its offset (torch: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
    return (value + 3) // 4 * 4


def _philox_consumption(numel: Any) -> Any:
    """An upper bound of the Philox offset span that a stock CUDA kernel touches to draw ``numel`` values; at most
    ``numel`` when that is 4 or more.

    A launch has at least 256 threads, and each advances 4 per curand call, which yields 4 values, or 2 of 64 bits
    (calc_execution_policy in ATen/native/cuda/DistributionTemplates.h). The dropout that loads 8 or 16 values at once
    makes two or four calls a step, whatever the generator's own advance says (ATen/native/cuda/Dropout.cu). A tensor
    past 2**31 bytes is drawn in halves, and every level of halving reserves its own share. 16 per 128 covers all.
    """
    if numel == 0:
        return 0
    if numel < 16:
        return 4 if numel < 8 else 8
    return (numel + 127) // 128 * 16


def _calc_first_shard_size(spec: DTensorSpec) -> list[int]:
    """The sizes that torch takes for the largest shard. Where a tensor dim is sharded repeatedly, torch divides it by
    the last mesh dim only, so this can be larger than the first shard, never smaller."""
    return _first_shard_size(tuple(spec.shape), tuple(spec.placements), tuple(spec.mesh.shape))


def _first_shard_size(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> list[int]:
    size: list[Any] = list(shape)
    for pieces, placement in zip(mesh_shape, placements):
        if isinstance(placement, Shard | _StridedShard):
            size[placement.dim] = _piece_sizes(shape[placement.dim], pieces, _chunks(placement))[0]
    return size


def _chunks(placement: Shard | _StridedShard) -> Any:
    return placement.split_factor if isinstance(placement, _StridedShard) else 1


def _sharding_mesh_dims(ndim: int, placements: Sequence[Placement]) -> list[list[int]]:
    """For each tensor dim, the mesh dims that shard it, in mesh order."""
    mesh_dims: list[list[int]] = [[] for _ in range(ndim)]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            mesh_dims[placement.dim].append(mesh_dim)
    return mesh_dims


def _calc_shard_info(mesh_coordinate: Sequence[Any], spec: DTensorSpec) -> tuple[list[Any], list[Any]]:
    """The shard's index, and the number of shards, along each tensor dim. Replicas of a shard get the same index."""
    coordinate, size = [], []
    for mesh_dims in _sharding_mesh_dims(spec.ndim, spec.placements):
        index: Any = 0
        total: Any = 1
        for mesh_dim in mesh_dims:
            index = index * spec.mesh.shape[mesh_dim] + mesh_coordinate[mesh_dim]
            total *= spec.mesh.shape[mesh_dim]
        coordinate.append(index)
        size.append(total)
    return coordinate, size


def _calc_shard_linear_idx(shard_coord: Sequence[Any], shard_size: Sequence[Any]) -> Any:
    """The row-major index of a shard among all shards."""
    index: Any = 0
    for coordinate, size in zip(shard_coord, shard_size):
        index = index * size + coordinate
    return index


def _local_numel(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: list[int]
) -> int:
    size = list(shape)
    for pieces, placement, piece in zip(mesh_shape, placements, coordinate):
        if isinstance(placement, Shard | _StridedShard):
            size[placement.dim] = _piece_size(_chunk_steps(size[placement.dim], pieces, _chunks(placement)), piece)
    return math.prod(size)


def _chunk_steps(whole: Any, pieces: int, chunks: Any) -> list[tuple[Any, Any, Any]]:
    """How a ``_StridedShard`` of ``split_factor=chunks`` cuts a dim into ``pieces``: the sizes of its chunks, how many there
    are of each, and by what step one is cut. Each chunk is cut into pieces, and a rank holds one of every chunk.
    ``Shard`` is one chunk."""
    chunk = max(1, (whole + chunks - 1) // chunks)
    return [
        (size, count, max(1, (size + pieces - 1) // pieces))
        for size, count in ((chunk, whole // chunk), (whole % chunk, 1))
    ]


def _piece_size(chunk_steps: list[tuple[Any, Any, Any]], piece: int) -> Any:
    return sum(count * max(0, min(step, size - piece * step)) for size, count, step in chunk_steps)


def _piece_sizes(whole: Any, pieces: int, chunks: Any) -> list[Any]:
    """The sizes, each once and the first piece's first, of the ``pieces`` that a dim of size ``whole`` is sharded into
    by a ``_StridedShard`` of ``split_factor=chunks``."""
    chunk_steps = _chunk_steps(whole, pieces, chunks)
    sizes: list[Any] = []
    # A chunk of size n, cut by step, gives whole steps up to piece n // step, there what is left, and nothing beyond.
    for piece in (0, *(n // step + i for n, _, step in chunk_steps for i in (0, 1)), pieces - 1):
        if piece < pieces and (size := _piece_size(chunk_steps, piece)) not in sizes:
            sizes.append(size)
    return sizes


def _largest_numel(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> int:
    """The size of the largest shard. It need not be the first one: a ``_StridedShard`` rounds up in each chunk, and so
    can make more of a smaller piece."""
    sizes: list[list[Any]] = [[size] for size in shape]
    for pieces, placement in zip(mesh_shape, placements):
        if isinstance(placement, Shard | _StridedShard):
            cut = [_piece_sizes(whole, pieces, _chunks(placement)) for whole in sizes[placement.dim]]
            sizes[placement.dim] = [size for one in cut for size in one]
    return math.prod(max(one) for one in sizes)


def _last_nonempty_shard(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[int], int]:
    """The mesh coordinate of the last shard that holds anything, and how many elements it holds.

    Along every mesh dim pieces only get smaller, and the first piece of anything that is not empty is not empty: a
    search by halves in each mesh dim in turn finds it in a few steps on a mesh of any size.
    """
    coordinate = [0] * len(mesh_shape)
    for mesh_dims in _sharding_mesh_dims(len(shape), placements):
        for mesh_dim in mesh_dims:
            low, high = 0, mesh_shape[mesh_dim] - 1
            while low < high:
                middle = (low + high + 1) // 2
                coordinate[mesh_dim] = middle
                if _local_numel(shape, placements, mesh_shape, coordinate):
                    low = middle
                else:
                    high = middle - 1
            coordinate[mesh_dim] = low
    return coordinate, _local_numel(shape, placements, mesh_shape, coordinate)


def _calc_layout(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    values_per_element: int = 1,
    least_span: int = 0,
) -> _ShardLayout:
    """Places the shards in the Philox stream.

    Shard ``i`` starts at ``i * step``, and every rank ends at ``numel``, both rounded up to a multiple of 4, where
    ``step`` is the size of the first shard: the places of torch's own tracker, wherever they keep shards and ops apart.
    They do not in three cases. A dim that is sharded repeatedly is divided by the last mesh dim only, so that the last
    shards run past the end, into the next op's numbers: here ``step`` is the true size then. Shards of fewer than 4
    elements share a place: here ``step`` is at least what a shard can consume. And where pieces of several dims are not
    all of one size the last shards can pass the end by either step: here the end is where the last of them ends.

    Args:
        values_per_element: how many real values an element takes (2 for complex dtypes).
        least_span: the Philox offset span that a local op can touch, however few values it draws.
    """

    def span(numel: int) -> Any:
        return max(_philox_consumption(numel * values_per_element), least_span)

    weights = [0] * len(placements)
    num_shards = 1
    for mesh_dims in reversed(_sharding_mesh_dims(len(shape), placements)):
        for mesh_dim in reversed(mesh_dims):
            weights[mesh_dim] = num_shards
            num_shards *= mesh_shape[mesh_dim]

    last_coordinate, last_numel = _last_nonempty_shard(shape, placements, mesh_shape)
    largest = _largest_numel(shape, placements, mesh_shape)
    end = _round_up_to_4(math.prod(shape))
    # Torch's step, unless the last shard would pass the end by it; then the true size of the largest shard.
    for first in (math.prod(_first_shard_size(shape, placements, mesh_shape)), largest):
        step = max(first, span(largest), 4)
        layout = _ShardLayout(tuple(weights), num_shards, step, end)
        last_end = layout.plan(last_coordinate).start + _round_up_to_4(span(last_numel))
        if last_end <= end:
            return layout
    return layout._replace(end=last_end)


_cached_layout = functools.lru_cache(maxsize=4096)(_calc_layout)


def _layout(
    shape: Sequence[Any],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    values_per_element: int = 1,
    least_span: int = 0,
) -> _ShardLayout:
    """:func:`_calc_layout`, worked out once for plain integers."""
    key = (tuple(shape), tuple(placements), tuple(mesh_shape), values_per_element, least_span)
    if all(type(size) is int for size in key[0]):
        return _cached_layout(*key)
    return _calc_layout(*key)  # symbolic sizes, while tracing, cannot be hashed


def _layout_for(spec: DTensorSpec, values_per_element: int = 1, least_span: int = 0) -> _ShardLayout:
    """The layout of a spec; ``spec.mesh`` gives only its shape, so that one entry serves every rank."""
    dtype = spec.tensor_meta.dtype if spec.tensor_meta is not None else None
    if dtype is not None and dtype.is_complex:
        values_per_element *= 2
    layout = _layout(spec.shape, spec.placements, spec.mesh.shape, values_per_element, least_span)
    # Where a dim is sharded in another order than that of the mesh dims, the last shard in number may be any in size.
    order = getattr(spec, "shard_order", None) or ()
    if any(list(one.mesh_dims) != sorted(one.mesh_dims) for one in order):
        return layout._replace(end=max(layout.end, layout.num_shards * _round_up_to_4(layout.step)))
    return layout


def _coordinate(mesh: DeviceMesh) -> list[Any]:
    """The coordinate of the calling rank, which is part of ``mesh``."""
    return [mesh._sym_get_coordinate(i) for i in range(mesh.ndim)]


def _plan_for(spec: DTensorSpec) -> _ShardPlan:
    """The plan of a spec on the calling rank, which is part of its mesh."""
    return _layout_for(spec).plan(_coordinate(spec.mesh))


# ---------------------------------------------------------------------------------------------------------------------
# CPU: a key, a shard index, and a strong mix of the two into a whole mt19937 state.
# ---------------------------------------------------------------------------------------------------------------------

_UINT64 = (1 << 64) - 1
# splitmix64: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    """The 64-bit finaliser of splitmix64, a bijection of [0, 2**64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)


def _int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# mt19937 has 624 words (ATen/core/MT19937RNGEngine.h); in the state tensor they are the low halves of 624 64-bit fields
# after 24 bytes of seed and position (CPUGeneratorImplStateLegacy in ATen/CPUGeneratorImpl.cpp).
_MT19937_WORDS = 624
_MT19937_BYTES = 24 + 8 * _MT19937_WORDS
# The three 64-bit fields before them: the seed; how many words are left, with a flag that it is seeded above; the next.
_MT19937_AT_WORD_1 = (0, (1 << 32) | (_MT19937_WORDS - 1), 1)


class _Mt19937:
    """Buffers for drawing a key from a CPU generator, and for a state mixed from (key, shard index).

    ``manual_seed`` is no way to such a state: it takes a 64-bit seed and keeps 32 bits of it (``init_with_uint32``),
    so of some 77,000 streams two would be equal. Here all 64 bits go in: word ``j`` is the upper half of ``z * f_j``
    modulo 2**64, with ``z`` the mixed key and ``f_j`` a fixed odd number (multiply-shift hashing: M. Dietzfelbinger
    et al., "A reliable randomized algorithm for the closest-pair problem", J. Algorithms 25, 1997). No two shards of an
    op share a ``z``, and none is 0. Word 0 is constant, so that no state is all zeros (``init_by_array`` of the
    reference mt19937).

    The state stands at word 1, so that a draw of up to 622 words needs no turn of the whole state.
    """

    def __init__(self) -> None:
        factors = [_int64(_splitmix64(j * _GOLDEN_GAMMA & _UINT64) | 1) for j in range(1, _MT19937_WORDS)]
        self.factors = _as_array(torch.tensor(factors, dtype=torch.int64, device="cpu"))
        self.key = torch.empty((), dtype=torch.int64, device="cpu")
        self.key_array = _as_array(self.key)
        self.generator = torch.Generator()
        self.state = self.generator.get_state()
        fields = _as_array(self.state[:_MT19937_BYTES].view(torch.int64))
        for i, field in enumerate((*_MT19937_AT_WORD_1, 0x80000000)):
            fields[i] = field
        self.words = fields[4:]

    def draw_state(self, generator: torch.Generator, shard_index: int) -> torch.Tensor:
        """Draws a 64-bit key from ``generator``, and returns the state mixed from it and ``shard_index``."""
        self.key.random_(-(1 << 63), None, generator=generator)
        return self.mixed_state(self.key_array.item(), shard_index)

    def mixed_state(self, key: int, shard_index: int) -> torch.Tensor:
        """A whole state from (key, shard index), in this buffer: copy or use it before the next call."""
        z = _int64(_splitmix64((key + (shard_index + 1) * _GOLDEN_GAMMA) & _UINT64) or _GOLDEN_GAMMA)
        self.words[:] = (self.factors * z) >> 32  # of a 64-bit field torch reads the lower half
        return self.state


def _as_array(tensor: torch.Tensor) -> Any:
    # On a few hundred words numpy's operators cost a third of torch's; a torch without numpy takes its own.
    try:
        return tensor.numpy()
    except RuntimeError:
        return tensor


class _PerThread(threading.local):
    mt19937: _Mt19937 | None = None


_per_thread = _PerThread()


def _get_mt19937() -> _Mt19937:
    mt19937 = _per_thread.mt19937
    if mt19937 is None:
        # Whatever surrounds a thread's first draw: the buffers are plain tensors, and serve every later one.
        with _disable_current_modes(), torch.inference_mode(False):
            mt19937 = _per_thread.mt19937 = _Mt19937()
    return mt19937


# ---------------------------------------------------------------------------------------------------------------------
# Regions: context managers around a local op that draws from the device's default generator.
# ---------------------------------------------------------------------------------------------------------------------


def _default_generator(device: torch.device) -> torch.Generator:
    """The live default generator of ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    handle = _get_device_handle(device.type)
    if not hasattr(handle, "default_generators"):
        raise RuntimeError(
            f"DTensor random ops need the live default generator of the device, "
            f"and torch.{device.type} has no default_generators."
        )
    if not handle.default_generators:
        handle.init()
    return handle.default_generators[handle.current_device() if device.index is None else device.index]


def _check_generator(generator: torch.Generator, device: torch.device) -> None:
    if generator.device.type != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{generator.device.type}': "
            f"the local tensor of the DTensor is on {device}, the generator on {generator.device}."
        )


@contextlib.contextmanager
def _lend(generator: torch.Generator, default: torch.Generator) -> Iterator[None]:
    """Lets the default slot draw from, and advance, ``generator``."""
    if generator is default:
        yield
    elif default.device.type == "cpu":
        own_state = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(own_state)
    else:
        own = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)  # shares the state, copies nothing
        try:
            yield
        finally:
            default.graphsafe_set_state(own)


@contextlib.contextmanager
def _philox_region(plan: _ShardPlan, generator: torch.Generator, default: torch.Generator) -> Iterator[None]:
    base = generator.get_offset()
    try:
        generator.set_offset(base + plan.start)
        with _lend(generator, default):
            yield
        generator.set_offset(base + plan.end)
    except BaseException:
        generator.set_offset(base)
        raise


@contextlib.contextmanager
def _mt19937_region(plan: _ShardPlan, generator: torch.Generator, default: torch.Generator) -> Iterator[None]:
    before = generator.get_state()
    try:
        if plan.num_shards == 1:
            with _lend(generator, default):
                yield
        else:
            state = _get_mt19937().draw_state(generator, plan.index)
            after = default.get_state()
            default.set_state(state)
            try:
                yield
            finally:
                default.set_state(after)
    except BaseException:
        generator.set_state(before)
        raise


def _live_region(
    plan: _ShardPlan, generator: torch.Generator, default: torch.Generator
) -> contextlib.AbstractContextManager[None]:
    region = _mt19937_region if default.device.type == "cpu" else _philox_region
    return region(plan, generator, default)


@contextlib.contextmanager
def _rank_region(
    states: dict[int, Any], rank: int, plan: _ShardPlan, default: torch.Generator, given: torch.Tensor | None
) -> Iterator[None]:
    """One simulated rank's region. LocalTensorMode keeps a state for each rank in ``states``, and lends it to the
    default generators while the op runs on that rank; with a generator passed, it starts from ``given`` instead."""
    from torch.distributed import _local_tensor

    own = states[rank]
    _local_tensor._set_rng_state(*own)
    if given is not None:
        default.set_state(given)
    try:
        with _live_region(plan, default, default):
            states[rank] = _local_tensor._get_rng_state()
            yield
            _local_tensor._set_rng_state(*states[rank])
        states[rank] = _local_tensor._get_rng_state()
    except BaseException:
        states[rank] = own
        raise


@contextlib.contextmanager
def _local_tensor_region(
    mode: Any, mesh: DeviceMesh, layout: _ShardLayout, generator: torch.Generator | None, device: torch.device
) -> Iterator[None]:
    """The region under LocalTensorMode, which runs an op once a simulated rank."""
    from torch.distributed import _local_tensor

    coordinate = _coordinate(mesh)
    states: dict[int, Any] = mode._per_rank_rng_states
    before = dict(states)
    given = None if generator is None else generator.get_state()
    default = _default_generator(device)
    ours = _local_tensor._get_rng_state()
    try:
        with contextlib.ExitStack() as ranks:
            with mode.disable():
                for rank in sorted(mode.ranks):
                    at = [_local_tensor._map_to_rank_local_val(index, rank) for index in coordinate]
                    ranks.enter_context(_rank_region(states, rank, layout.plan(at), default, given))
            yield
        if generator is not None:
            _local_tensor._set_rng_state(*states[rank])  # the same on every rank
            generator.set_state(default.get_state())
            states.update(before)
    finally:
        _local_tensor._set_rng_state(*ours)


class _RNGStateTracker:
    """What torch's dispatcher asks for the region of a random op, and the switch that turns regions off."""

    def __init__(self, device: torch.device):
        self._device = device
        self._device_handle = _get_device_handle(device.type)
        if not (self._device_handle and self._device_handle.is_available()):
            raise RuntimeError(
                f"{self.__class__.__name__} instantiation requires the presence of "
                f"{device.type} device but couldn't find."
            )
        self._use_distribute_region = True

    @property
    def distribute_region_enabled(self) -> bool:
        return self._use_distribute_region

    @distribute_region_enabled.setter
    def distribute_region_enabled(self, value: bool) -> None:
        self._use_distribute_region = value

    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def _manual_seed(self, parallel_seed: int) -> None:
        torch.manual_seed(parallel_seed)


class OffsetBasedRNGTracker(_RNGStateTracker):
    """The tracker: it holds no generator state, only the places that the shards of a DTensor draw from.

    Args:
        device_mesh (:class:`DeviceMesh`): a mesh that the calling rank is part of.
        run_state_sync (bool): accepted for compatibility; making a tracker never communicates.
    """

    def __init__(self, device_mesh: DeviceMesh, run_state_sync: bool = True):
        super().__init__(_resolve_device(device_mesh))

    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """The region of a random op whose output is laid out as ``spec`` and which draws from the default slot of the
        mesh's device. Does not communicate.

        Args:
            generator: the generator to read and advance instead of the default one, lent to the default slot.

        Raises:
            RuntimeError: ``generator`` is of another device type than the mesh.
        """
        device = torch.device(spec.mesh.device_type)
        if generator is not None:
            _check_generator(generator, device)
        if not self.distribute_region_enabled:
            return contextlib.nullcontext() if generator is None else _lend(generator, _default_generator(device))
        if not spec.mesh._is_current_rank_part_of_mesh():
            return contextlib.nullcontext()
        if (mode := enabled_local_tensor_mode()) is not None and mode._per_rank_rng_states:
            return _local_tensor_region(mode, spec.mesh, _layout_for(spec), generator, device)
        plan = _plan_for(spec)
        if _are_we_tracing():
            if plan.num_shards > 1 or generator is not None:
                raise RuntimeError(
                    f"A random op on a sharded DTensor of a {device.type} mesh cannot be traced by way of its region, "
                    "which moves a live generator: install torch_dtensor_rng, or run the op in eager mode."
                )
            return contextlib.nullcontext()
        default = _default_generator(device)
        return _live_region(plan, default if generator is None else generator, default)

    def _set_pre_op_offset(self, state: _PhiloxState, spec: DTensorSpec) -> None:
        """Moves ``state`` to the place where this rank's shard starts."""
        state.offset = state.offset + self._compute_rng_offsets(spec)[0]

    def _set_post_op_offset(self, state: _PhiloxState, spec: DTensorSpec, old_offset: torch.Tensor) -> None:
        """Moves ``state`` to where every rank ends after an op that began at ``old_offset``."""
        state.offset = old_offset + self._compute_rng_offsets(spec)[1]

    def _compute_rng_offsets(self, spec: DTensorSpec) -> tuple[int, int]:
        """(start, end): Philox offsets relative to the generator's, both multiples of 4; a function of shapes,
        placements and the rank's coordinate alone."""
        plan = _plan_for(spec)
        return plan.start, plan.end

    def _calc_shard_linear_idx(self, shard_coord: Sequence[Any], shard_size: Sequence[Any]) -> Any:
        return _calc_shard_linear_idx(shard_coord, shard_size)


def _resolve_device(device_mesh: DeviceMesh) -> torch.device:
    device_type = device_mesh.device_type
    if device_type == "cpu":
        return torch.device("cpu")
    device_handle = _get_device_handle(device_type)
    if device_handle is None:
        raise AssertionError
    device_idx = device_mesh.get_rank() % device_handle.device_count()

    get_device: Callable[[Any], torch.device] = maybe_run_for_local_tensor(
        lambda index: torch.device(f"{device_type}:{index:d}")
    )
    return get_device(device_idx)
