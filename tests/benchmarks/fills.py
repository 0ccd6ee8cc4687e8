"""How fast a rank fills its shard under policy single_device, against the plain call on as many elements, in one run.

``python tests/benchmarks/fills.py [--json FILE]``, on a CUDA device. A column is a way of filling one rank's shard:
``plain`` the stock op on a local tensor of the shard's size (other numbers), ``fused`` the package, ``replay`` the package
without its kernels, ``whole`` the stock op on the whole tensor and a copy of the slice (what exactness costs without it).
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.utils.benchmark import Timer

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

from worlds import as_rank  # noqa: E402

import torch_dtensor_rng as tdr  # noqa: E402
from torch_dtensor_rng import _single_device  # noqa: E402

# name: shape of the whole, mesh, placements, dtype
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], torch.dtype]] = {
    "rows 1/8 of 32768 x 16384": ((32768, 16384), (8,), (Shard(0),), torch.float32),
    "whole 32768 x 16384, 2 ranks' rows": ((32768, 16384), (2,), (Shard(0),), torch.float32),
    "aligned columns 1/8 of 32768 x 8192": ((32768, 8192), (8,), (Shard(1),), torch.float32),
    "unaligned columns 1/8 of 20000 x 5000": ((20000, 5000), (8,), (Shard(1),), torch.float32),
    "unaligned columns 1/8 of 32768 x 16384": ((32768, 16384), (8,), (Shard(1),), torch.float32),
    "rows and columns 1/8 of 32768 x 8192": ((32768, 8192), (2, 4), (Shard(0), Shard(1)), torch.float32),
    "bfloat16 rows 1/8 of 32768 x 16384": ((32768, 16384), (8,), (Shard(0),), torch.bfloat16),
}
OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "exponential_": lambda x: x.exponential_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
}


def seconds(fn: Callable[[], Any]) -> float:
    timer = Timer("fn()", globals={"fn": fn})
    timer.timeit(3)
    return min(timer.timeit(40).median for _ in range(3))  # 40, so that waiting for the device does not count


def measure(op: str, layout: str, with_whole: bool) -> dict[str, float]:
    shape, mesh_shape, placements, dtype = LAYOUTS[layout]
    draw = OPS[op]
    mesh = as_rank(3 % mesh_shape[0], mesh_shape, "cuda")
    whole_dtensor = torch.distributed.tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    local = whole_dtensor.to_local()
    found = {"bytes": local.numel() * local.element_size(), "plain": seconds(lambda: draw(local))}
    found["zero_"] = seconds(local.zero_)
    with tdr.install("single_device"):
        found["fused"] = seconds(lambda: draw(whole_dtensor))
    kernels = _single_device._kernels
    _single_device._kernels = lambda: None  # type: ignore[assignment]
    with tdr.install("single_device"):
        found["replay"] = seconds(lambda: draw(whole_dtensor))
    _single_device._kernels = kernels
    if with_whole:
        plain = torch.empty(shape, dtype=dtype, device="cuda")
        index = tuple(slice(0, size) for size in local.shape)

        def materialise() -> None:
            drawn = draw(plain)
            local.copy_((drawn[0] if isinstance(drawn, tuple) else drawn)[index])

        found["whole"] = seconds(materialise)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--ops", nargs="*", default=[*OPS])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: times as fast as the plain local fill")
    print(f"{'':56}{'plain':>12}{'zero_':>9}{'fused':>9}{'replay':>9}{'whole':>9}")
    results = {}
    for layout in LAYOUTS:
        for op in args.ops:
            found = results[f"{op}, {layout}"] = measure(op, layout, True)
            rate = found["bytes"] / found["plain"] / 1e12
            ratios = "".join(
                f"{found['plain'] / found[one]:9.2f}" if one in found else " " * 9
                for one in ("zero_", "fused", "replay", "whole")
            )
            print(f"{op + ', ' + layout:56}{rate:7.2f} TB/s{ratios}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
