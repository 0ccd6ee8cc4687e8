"""The words of Philox, against the known answers of Random123 and against what torch and the fused kernels draw."""

import pytest
import torch
from philox import philox4x32_10, word_of
from torch.distributed.tensor import Shard, empty
from worlds import default_generator, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _stream

ONES = 0xFFFFFFFF
KNOWN = [  # kat_vectors of Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter, key, words):
    assert philox4x32_10(counter, key) == words


RANGE = (1 << 28) - 1
SEED = (1 << 63) + 12345


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 4, 40000, 1 << 35])
@pytest.mark.parametrize("shape, dim", [((3000000,), 0), ((3000, 1000), 1), ((512, 8192), 1)])
def test_the_words_of_a_shard(shape, dim, offset):
    generator = default_generator("cuda")
    numel = torch.Size(shape).numel()
    threads = _stream.threads(numel, _stream.most_threads_of(torch.device("cuda", torch.cuda.current_device())))
    indices = torch.arange(numel).view(shape)

    def on_rank(rank, mesh):
        x = empty(shape, device_mesh=mesh, placements=[Shard(dim)], dtype=torch.int64)
        torch.manual_seed(SEED)
        generator.set_offset(offset)
        drawn = x.random_(0, RANGE).to_local().cpu().flatten()
        held = indices.chunk(3, dim)[rank].flatten()
        for at in range(0, len(held), len(held) // 50):
            assert drawn[at] == word_of(int(held[at]), SEED, offset, threads) % RANGE

    with tdr.install("single_device"):
        each_rank((3,), on_rank, "cuda")
