"""The script for several GPUs runs on the CPU too, and what it checks can fail."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

SCRIPT = pathlib.Path(__file__).parent / "gpu" / "company.py"
sys.path.append(str(SCRIPT.parent))

import company  # noqa: E402

# Of the others, test_demo.py runs the demonstration, and two are for CUDA alone.
PARTS = ("models", "exactness", "offset", "silence", "drift", "training")


def test_four_processes_on_the_cpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--steps", "6", "--json", str(tmp_path / "results")]
    done = subprocess.run([*command, "--parts", *PARTS, "graphs"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = json.loads((tmp_path / "results").read_text())
    assert "4 ranks over gloo" in found["about"] and found["about"] == done.stdout.splitlines()[0]
    outcomes = {part: {one["outcome"] for one in found["results"] if one["part"] == part} for part in PARTS}
    assert outcomes == {part: {"passed"} for part in PARTS}
    assert found["results"][-1] == {
        "part": "graphs",
        "check": "graphs",
        "outcome": "skipped",
        "reason": "for CUDA alone",
    }
    (of_half,) = (one for one in found["results"] if one["check"] == "resumed on 2 ranks: the losses go on")
    assert of_half["figures"]["steps"] == [3, 3]


def all_agree(rank):
    rank.check("one", [], rank=rank.rank)


def one_finds_a_problem(rank):
    rank.check("one", ["it is odd"] if rank.rank == 1 else [])


def one_raises(rank):
    rank.check("one", [])
    if rank.rank == 1:
        raise ValueError("not this rank")
    dist.barrier()


def one_dies(rank):
    if rank.rank == 1:
        os._exit(7)
    dist.barrier()


def one_hangs(rank):
    if rank.rank == 1:
        torch.futures.Future().wait()


@pytest.mark.parametrize(
    ("part", "timeout", "outcomes", "reason"),
    [
        (all_agree, 60, {"one": "passed"}, None),
        (one_finds_a_problem, 60, {"one": "failed"}, "rank 1: it is odd"),
        (one_raises, 60, {"one": "passed", "runs to its end": "failed"}, "ValueError: not this rank"),
        (one_dies, 60, {"runs to its end": "failed"}, "rank 1: the process ended with exit code 7"),
        (one_hangs, 3, {"runs to its end": "failed"}, "did not return within 3 s"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_rank_that_fails_is_reported_and_holds_up_no_other(part, timeout, outcomes, reason):
    options = argparse.Namespace(device="cpu", backend="gloo", timeout=timeout)
    results = company.merged("this", company.run_part(part, 2, options))
    assert {one["check"]: one["outcome"] for one in results} == outcomes
    if reason is None:
        assert sorted(results[0]["figures"]["rank"]) == [0, 1]
        assert company.line(results[0]) == "passed  this: one; rank 0 to 1"
    else:
        line = company.line(results[-1])
        assert line.startswith(f"failed  this: {results[-1]['check']}: rank ") and line.endswith(reason)


@pytest.mark.parametrize("changed", [None, "weight 3", "rank 0 (dp 0, tp 0)"])
def test_checksums_of_the_demonstration_are_compared(changed, monkeypatch):
    names = [f"weight {i}" for i in range(20)]

    def run(command, **kwargs):
        alone = command[-1] == "1"
        end = "other" if changed and changed.startswith("rank") and alone else "end"
        rows = [[name, "normal_", "9x9", "S(0)", "4", "yes", "-", f"sum of {name}"] for name in names]
        if alone and changed in names:
            rows[names.index(changed)][-1] = "other"
        rows.append(["rank 0 (dp 0, tp 0)", "begin", end])
        return subprocess.CompletedProcess(command, 0, "\n".join("  ".join(row) for row in rows), "")

    monkeypatch.setattr(company.subprocess, "run", run)
    options = argparse.Namespace(device="cpu", size=4, timeout=60)
    *runs, last = company.demonstration(options)
    assert [one["outcome"] for one in runs] == ["passed"] * 3
    assert last["figures"] == {"runs": [2], "checksums": [21]}
    assert last["outcome"] == ("failed" if changed else "passed")
