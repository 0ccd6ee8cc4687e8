"""Where the stock CUDA kernels draw: the layout of a whole tensor's numbers in the Philox stream, as plain functions."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

# block_size_bound in ATen/native/cuda/DistributionTemplates.h, and block_size in ATen/native/cuda/Dropout.cu.
_THREADS_A_BLOCK = 256
_LARGEST_32_BIT = (1 << 31) - 1


class Leaf(NamedTuple):
    """A part of a tensor that one kernel fills: the elements [begin, end) in memory order, from ``offset`` on."""

    begin: int
    end: int
    offset: int


class Stream(NamedTuple):
    """How the stock kernels lay a whole tensor's numbers out in the Philox stream.

    ``leaves`` are its parts; ``end`` is how far the generator advances; a launch has at most ``most_threads`` threads,
    and a thread takes ``values`` from a Philox call. Offsets count from the generator's at the call.
    """

    leaves: tuple[Leaf, ...]
    end: int
    most_threads: int
    values: int

    def group(self, leaf: Leaf) -> int:
        """How many elements of a leaf lie at one offset."""
        return threads(leaf.end - leaf.begin, self.most_threads) * self.values


def threads(numel: int, most: int) -> int:
    """How many threads fill ``numel`` elements (``calc_execution_policy`` in ATen/native/cuda/DistributionTemplates.h)."""
    return min(most, -(-numel // _THREADS_A_BLOCK) * _THREADS_A_BLOCK)


def advance(numel: int, most_threads: int, values: int) -> int:
    """How far a kernel that fills ``numel`` elements advances the generator (``calc_execution_policy``, there)."""
    return ((numel - 1) // (threads(numel, most_threads) * values) + 1) * 4


def _split(begin: int, end: int, element_size: int) -> Iterator[tuple[int, int]]:
    """Halves, until 32 bits address one (``can_use_32bit_indexing`` and ``SplitUntil32Bit`` in ATen/TensorIterator.cpp)."""
    if 1 + (end - begin - 1) * element_size <= _LARGEST_32_BIT:
        yield begin, end
    else:
        middle = begin + (end - begin) // 2
        yield from _split(begin, middle, element_size)
        yield from _split(middle, end, element_size)


@functools.lru_cache(maxsize=1024)
def stream_of(numel: int, element_size: int, most_threads: int, values: int) -> Stream:
    """The stream of a dense tensor of ``numel`` elements. One that is split advances the generator for the whole first,
    and then for each part (``distribution_nullary_kernel``, there)."""
    parts = [*_split(0, numel, element_size)]
    offset = advance(numel, most_threads, values) if len(parts) > 1 else 0
    leaves = []
    for begin, end in parts:
        leaves.append(Leaf(begin, end, offset))
        offset += advance(end - begin, most_threads, values)
    return Stream(tuple(leaves), offset, most_threads, values)


@functools.lru_cache
def most_threads_of(device: torch.device) -> int:
    """How many threads a launch has at most: as many as the device runs at once."""
    properties = torch.cuda.get_device_properties(device)
    blocks = properties.max_threads_per_multi_processor // _THREADS_A_BLOCK
    return properties.multi_processor_count * blocks * _THREADS_A_BLOCK


def side_by_side(numel: int, element_size: int) -> int:
    """How many elements that lie next to each other a thread of ``native_dropout`` takes (``get_vector_size`` in
    ATen/native/cuda/Dropout.cu)."""
    return next(n for n in (8, 4, 2, 1) if n * element_size <= 16 and numel % n == 0)
