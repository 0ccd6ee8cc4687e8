"""All benchmarks in one run, on a CUDA device: what is printed, figures as JSON, and a picture of the fills.

    python tests/benchmarks/bench.py FOLDER

The picture needs matplotlib.
"""

import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SCRIPTS = {"host_cost.py": [], "fills.py": ["--json"], "models.py": ["--json"], "world_size.py": []}


def picture(fills: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """How many times as fast as the plain local fill, a bar for each way of filling a shard."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ways = ("fused", "replay", "whole")
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(fills) + 1))
    for at, way in enumerate(ways):
        places = [row + 0.27 * at for row in range(len(fills))]
        axes.barh(places, [one["plain"] / one[way] for one in fills.values()], 0.25, label=way)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.27 for row in range(len(fills))], list(fills), fontsize=7)
    axes.set_xlabel("times as fast as the plain fill of as many elements")
    axes.set_ylim(len(fills) - 0.1, -0.4)
    axes.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    printed = []
    for script, options in SCRIPTS.items():
        json_file = [str(folder / f"{pathlib.Path(script).stem}.json") for _ in options]
        run = subprocess.run(
            [sys.executable, HERE / script, *options, *json_file], stdout=subprocess.PIPE, text=True, check=True
        )
        print(run.stdout, flush=True)
        printed.append(run.stdout)
    (folder / "printed.txt").write_text("\n".join(printed))
    try:
        picture(json.loads((folder / "fills.json").read_text()), folder / "fills.png")
    except ImportError:
        print("no matplotlib: no picture")


if __name__ == "__main__":
    main()
