"""How long one rank of eight takes to initialise its share of Llama 3's parameters, and what memory that takes beside them.

``python tests/benchmarks/models.py [--json FILE]``, on a CUDA device: FSDP2 x tensor parallelism, 2 x 4, float32, ``normal_``
of every weight in turn, three ways. ``plain`` fills the local tensors, each rank with numbers of its own; ``whole`` draws
each weight as a whole and copies the slice; ``single_device`` is the package.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.distributed.tensor.placement_types import _StridedShard

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

from worlds import as_rank  # noqa: E402

import torch_dtensor_rng as tdr  # noqa: E402

VOCABULARY, KEYS = 128256, 1024
MODELS = {"Llama 3 8B": (4096, 14336, 32), "Llama 3 70B": (8192, 28672, 80)}
COLUMNS = [_StridedShard(0, split_factor=4), Shard(0)]
ROWS = [Shard(0), Shard(1)]
NORM = [Shard(0), Replicate()]


def weights(model: str) -> list[tuple[tuple[int, ...], list[Any], int]]:
    """(shape, placements, how many of them)."""
    width, hidden, layers = MODELS[model]
    return [
        ((VOCABULARY, width), COLUMNS, 2),
        ((width, width), COLUMNS, layers),
        ((KEYS, width), COLUMNS, 2 * layers),
        ((width, width), ROWS, layers),
        ((hidden, width), COLUMNS, 2 * layers),
        ((width, hidden), ROWS, layers),
        ((width,), NORM, 2 * layers + 1),
    ]


def materialised(x: DTensor) -> None:
    whole = torch.empty(x.shape, device="cuda").normal_(0, 0.02)
    x._local_tensor.copy_(whole[tuple(slice(0, size) for size in x._local_tensor.shape)])


WAYS: dict[str, Callable[[DTensor], Any]] = {
    "plain": lambda x: x._local_tensor.normal_(0, 0.02),
    "whole": materialised,
    "single_device": lambda x: x.normal_(0, 0.02),
}


def measure(model: str) -> dict[str, dict[str, float]]:
    mesh = as_rank(5, (2, 4), "cuda")
    found = {}
    with tdr.install("single_device"):
        # One tensor of each kind: what counts beside the parameters is the same.
        kinds = [
            (empty(shape, device_mesh=mesh, placements=placements), count)
            for shape, placements, count in weights(model)
        ]
        for way, fill in WAYS.items():
            for x, _ in kinds:
                fill(x)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for x, count in kinds:
                for _ in range(count):
                    fill(x)
            end.record()
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
            found[way] = {"milliseconds": start.elapsed_time(end), "extra MiB": extra / 2**20}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: one rank's share of 8, float32")
    results = {model: measure(model) for model in MODELS}
    for model, found in results.items():
        for way, figures in found.items():
            print(f"{model:14}{way:16}{figures['milliseconds']:10.1f} ms{figures['extra MiB']:10.1f} MiB")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
