"""Host cost of one small random op: plain, DTensor with torch's own tracker, DTensor with each policy, in one run.

    python tests/benchmarks/host_cost.py [--device cpu|cuda] [--numel 256]

The three take turns, and each figure is the least of its medians. Timed without waiting for the device: what a training
loop's thread pays.
"""

import argparse
import pathlib
import statistics
import sys
import timeit
import warnings

import torch
from torch.distributed.tensor import Shard, empty

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

from worlds import as_rank  # noqa: E402

import torch_dtensor_rng as tdr  # noqa: E402


def median_us(call, device: str, number: int = 500, repeat: int = 7) -> float:
    for _ in range(50):
        call()
    times = []
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(timeit.timeit(call, number=number) / number * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, default=256, help="local elements")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = options.device
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)

    mesh = as_rank(1, (4,), device)
    local = torch.ones(options.numel, device=device)
    x = empty(4 * options.numel, device_mesh=mesh, placements=[Shard(0)]).fill_(1)
    generator = torch.Generator(device).manual_seed(1)
    calls = {
        "uniform_": lambda t: t.uniform_(),
        "uniform_, generator=": lambda t: t.uniform_(generator=generator),
        "randn_like": torch.randn_like,
        "native_dropout": lambda t: torch.native_dropout(t, 0.5, True),
        "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
    }
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, {options.numel} local elements, microseconds an op")
    print(f"{'':22}{'plain':>9}{'torch':>18}{'offset':>18}{'single_device':>18}")
    for name, call in calls.items():
        plain, theirs = [], []
        ours: dict[str, list[float]] = {"offset": [], "single_device": []}
        for _ in range(options.rounds):
            plain.append(median_us(lambda: call(local), device))  # noqa: B023
            theirs.append(median_us(lambda: call(x), device, number=200))  # noqa: B023
            for policy, figures in ours.items():
                with tdr.install(policy):
                    figures.append(median_us(lambda: call(x), device))  # noqa: B023
        base = min(plain)
        columns = "".join(f"{min(one):10.2f} x{min(one) / base:6.2f}" for one in (theirs, *ours.values()))
        print(f"{name:22}{base:9.2f}{columns}")


if __name__ == "__main__":
    main()
