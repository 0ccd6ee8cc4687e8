"""What a small op costs on meshes of 8 to 65,536 ranks: the same.

    python tests/benchmarks/world_size.py [--device cpu|cuda]

A fake process group plays one rank. Microseconds of the host an op, ``uniform_`` of 256 local elements.
"""

import argparse
import pathlib
import sys
import warnings

import torch
from torch.distributed.tensor import Shard, empty

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

from host_cost import median_us  # noqa: E402
from worlds import as_rank  # noqa: E402

import torch_dtensor_rng as tdr  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
    policies = ("offset", "single_device") if device == "cuda" else ("offset",)  # on the CPU it draws the whole tensor
    sizes = (8, 64, 512, 4096, 65536)
    costs: dict[tuple[int, str], list[float]] = {}
    for _ in range(3):
        for size in sizes:
            x = empty(size * 256, device_mesh=as_rank(3, (size,), device), placements=[Shard(0)])
            for policy in policies:
                with tdr.install(policy):
                    costs.setdefault((size, policy), []).append(median_us(x.uniform_, device))
    for policy in policies:
        for size in sizes:
            cost, of_8 = min(costs[size, policy]), min(costs[8, policy])
            print(f"{policy:14}{size:8} ranks{cost:8.2f} us  x{cost / of_8:5.2f}")


if __name__ == "__main__":
    main()
