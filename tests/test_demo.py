"""The demonstration: it runs, and what it checks can fail."""

import argparse
import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from worlds import coordinates

from torch_dtensor_rng import __main__ as demo


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_dtensor_rng", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def row(output: str, name: str) -> list[str]:
    """The columns of the table's row ``name``."""
    return next(columns for line in output.splitlines() if (columns := re.split("  +", line))[0] == name)


def test_four_processes():
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "4 processes over gloo on cpu, mesh dp 2 x tp 2" in done.stdout
    assert row(done.stdout, "blocks.0.qkv.weight")[2:7] == ["192x64", "dp _S(0, 2), tp S(0)", "4", "yes", "-"]
    assert row(done.stdout, "blocks.1.out.bias")[2:7] == ["64", "dp S(0), tp R", "2", "yes", "yes"]
    assert row(done.stdout, "head.weight")[1:7] == ["trunc_normal_", "99x64", "dp _S(0, 2), tp S(0)", "4", "yes", "-"]
    assert row(done.stdout, "norm.weight")[4:7] == ["2", "const", "yes"]
    assert row(done.stdout, "shift")[4:7] == ["2", "-", "yes"]  # one shard is empty
    assert row(done.stdout, "dropout over dp and tp")[4:7] == ["4", "yes", "-"]
    states = {tuple(row(done.stdout, f"rank {2 * dp + tp} (dp {dp}, tp {tp})")[1:]) for dp, tp in coordinates((2, 2))}
    assert len(states) == 1
    before, after = states.pop()
    assert before != after
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert done.stdout.endswith("\nall of it holds\n")


def test_an_odd_number_of_processes():
    done = run_demo("--nproc", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mesh dp 3 x tp 1" in done.stdout
    assert row(done.stdout, "positions.weight")[4:7] == ["3", "yes", "-"]
    assert done.stdout.endswith("\nall of it holds\n")


MESHES = (("--nproc", "1"), ("--nproc", "4", "--tp", "1"), ("--nproc", "4", "--tp", "2"))
PARAMETERS = [name for name, _ in demo.Transformer().named_parameters()]
MASKS = ["dropout in forward", "dropout over dp and tp"]
END = "rank 0 (dp 0, tp 0)"


def checksums_by_mesh(policy: str) -> list[dict[str, str]]:
    """For each mesh, the checksums of the parameters and masks, and where the generator ends."""
    found = []
    for mesh in MESHES:
        done = run_demo("--policy", policy, *mesh)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert f"policy {policy}," in done.stdout and done.stdout.endswith("\nall of it holds\n")
        found.append({name: row(done.stdout, name)[-1] for name in (*PARAMETERS, *MASKS, END)})
    return found


def test_the_checksums_under_single_device_are_those_of_the_plain_model_on_every_mesh():
    model = demo.Transformer()
    torch.manual_seed(demo.SEED)
    demo.init_weights(model)
    plain = {name: demo.digest_of(parameter)[:8] for name, parameter in model.named_parameters()}
    plain[END] = demo.state_of(torch.default_generator)
    first, *others = checksums_by_mesh("single_device")
    assert {name: first[name] for name in plain} == plain
    assert others == [first, first]


def test_the_checksums_under_offset_depend_on_the_mesh():
    first, four, two_by_two = checksums_by_mesh("offset")
    for name in [*PARAMETERS, *MASKS]:
        constant = name in PARAMETERS and demo.init_of(name)[0] in demo.CONSTANT
        assert (first[name] == four[name] == two_by_two[name]) is constant, name


@pytest.mark.gpu
def test_on_cuda():
    done = run_demo("--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^rank 3 .* seed 1234, offset 0  seed 1234, offset [1-9]", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\nall of it holds\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--device", "cuda"])
    assert "--device cuda needs a CUDA device, and torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--nproc", "0"], "--nproc has to be 1 or more, found 0"),
        (["--nproc", "4", "--tp", "3"], "--tp has to divide --nproc 4 and the model's 4 heads, found 3"),
        (["--nproc", "8", "--tp", "8"], "--tp has to divide --nproc 8 and the model's 4 heads, found 8"),
        (["--tp", "0"], "--tp has to divide --nproc 4 and the model's 4 heads, found 0"),
        (["--policy", "none"], "argument --policy: invalid choice: 'none'"),
    ],
)
def test_what_it_does_not_take(arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert error in capsys.readouterr().err


def raises_on_rank_1(rank: int, options: argparse.Namespace, backend: str, store: str, answer: Any) -> None:
    if rank == 1:
        raise ZeroDivisionError("on purpose")


def test_the_traceback_of_a_process_that_fails_is_shown(capsys):
    assert demo.run(argparse.Namespace(nproc=2), "gloo", raises_on_rank_1) == 1
    error = capsys.readouterr().err
    assert "rank 1 failed" in error
    assert "in raises_on_rank_1" in error
    assert "ZeroDivisionError: on purpose" in error


# ---------------------------------------------------------------------------------------------------------------------
# The checks, on reports that are made up.
# ---------------------------------------------------------------------------------------------------------------------


def made_up(name: str, init: str, shard: tuple[int, ...], num_shards: int) -> demo.Held:
    digest = f"{name} {shard}"
    return demo.Held(name, init, (8, 8), "dp S(0)", num_shards, shard, 64 // num_shards, digest, digest, name)


def good_reports() -> list[demo.Report]:
    """Of a 2 x 2 mesh: one tensor sharded on both dims, one on the first, and a constant."""
    reports = []
    for dp, tp in coordinates((2, 2)):
        constant = dataclasses.replace(made_up("norm", "ones_", (dp,), 2), digest="ones", head="ones")
        first = (made_up("weight", "normal_", (dp, tp), 4), made_up("bias", "uniform_", (dp,), 2), constant)
        same = demo.digests(first)
        masks = (made_up("dropout", "mask", (dp, tp), 4),)
        reports.append(demo.Report(f"dp {dp}, tp {tp}", first, "a", "b", same, same, "b", "b", "b", masks, "c"))
    return reports


def with_tensor(report: demo.Report, index: int, **changes: Any) -> demo.Report:
    first = list(report.first)
    first[index] = dataclasses.replace(first[index], **changes)
    digests = demo.digests(first)
    return dataclasses.replace(report, first=tuple(first), again=digests, passed=digests)


def test_good_reports_hold():
    assert demo.failures(good_reports()) == []
    assert "NO" not in demo.render(good_reports())


def test_equal_shards_are_reported():
    reports = [with_tensor(report, 0, digest="same", head="same") for report in good_reports()]
    assert demo.failures(reports) == ["weight: shards are not distinct"]
    assert row(demo.render(reports), "weight")[5:7] == ["NO", "-"]


def test_two_equal_shards_are_reported_though_their_sizes_differ():
    reports = good_reports()
    reports[3] = with_tensor(reports[3], 0, head=reports[0].first[0].head)
    assert demo.failures(reports) == ["weight: shards are not distinct"]


def test_empty_shards_are_not_compared():
    reports = good_reports()
    for rank in (2, 3):
        reports[rank] = with_tensor(reports[rank], 0, numel=0, head="nothing")
    assert demo.failures(reports) == []


def test_replicas_that_differ_are_reported():
    reports = good_reports()
    reports[1] = with_tensor(reports[1], 1, digest="other")
    assert demo.failures(reports) == ["bias: replicas do not agree"]
    reports = good_reports()
    reports[2] = with_tensor(reports[2], 2, digest="zeros")
    assert demo.failures(reports) == ["norm: replicas do not agree"]


@pytest.mark.parametrize(
    "changes, failures",
    [
        ({"before": "b"}, ["moved the generator on every rank", "was the same on all ranks before the init"]),
        ({"after": "d"}, ["is the same on all ranks after the init", "leaves that generator where"]),
        ({"again": ("", "", "")}, ["after reseeding gives equal parameters"]),
        ({"passed": ("", "", "")}, ["with generator= gives the parameters of the default generator"]),
        ({"passed_after": "a"}, ["leaves that generator where the default one was left"]),
        ({"kept_after": "d"}, ["leaves the default one untouched"]),
        ({"trained": "b"}, ["dropout in train mode moved the generator", "is the same on all ranks after dropout"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_one_rank_sees_otherwise_is_reported(changes: dict[str, Any], failures: list[str]):
    reports = good_reports()
    reports[1] = dataclasses.replace(reports[1], **changes)
    found = demo.failures(reports)
    assert len(found) == len(failures)
    for text, expected in zip(found, failures):
        assert text.startswith("not so: ") and expected in text
