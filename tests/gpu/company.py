"""The package on several GPUs of one host: each part in processes of its own, a rank each.

    python tests/gpu/company.py [--parts exactness training] [--steps 50] [--json FILE]

With several GPUs every rank has one, over NCCL. With one GPU ``--processes`` ranks share it, and without a GPU, or with
``--device cpu``, they run on the CPU; both over gloo. A line is printed for every check, and the exit status is 1 if
one has failed. Figures are the least and the largest of all ranks; times are shown, never judged.
"""

import argparse
import datetime
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty  # noqa: E402
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from worlds import default_generator  # noqa: E402

import torch_dtensor_rng as tdr  # noqa: E402
from torch_dtensor_rng import __main__ as demo  # noqa: E402

SEED = 11
POLICIES = ("offset", "single_device")

# ---------------------------------------------------------------------------------------------------------------------
# The processes of a part.
# ---------------------------------------------------------------------------------------------------------------------


class Rank:
    """A rank of a part: where it is, and what it has found so far."""

    def __init__(self, rank, size, options):
        self.rank, self.size, self.options = rank, size, options
        self.rows: list[dict[str, Any]] = []
        self.device = torch.device(options.device)
        if options.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.generator = default_generator(options.device)
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def line(self):
        """The mesh of all ranks, of one dim."""
        return self._mesh(self.size)

    def plane(self):
        """The mesh of all ranks, of two dims."""
        return self._mesh(self.size // 2, 2) if self.size % 2 == 0 else self._mesh(self.size, 1)

    def _mesh(self, *shape):
        if shape not in self.meshes:
            self.meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        return self.meshes[shape]

    def check(self, name, problems, **figures):
        """A check, which has passed if there are no problems."""
        self.rows.append({"check": name, "problems": list(problems), "figures": figures})

    def skip(self, name, reason):
        self.rows.append({"check": name, "skipped": reason})

    def gather(self, one):
        """What every rank passes. Tensors have to be on the CPU, as gloo gathers no CUDA tensors."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, one)
        return found

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def _process(part, rank, size, options, store, answers):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    one = None
    try:
        one = Rank(rank, size, options)
        dist.init_process_group(
            options.backend,
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=options.timeout),
        )
        part(one)
        one.synchronize()
        answers.put((rank, one.rows, None))
    except BaseException:
        answers.put((rank, one.rows if one else [], traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)  # as the demonstration does, and without waiting for ranks that have failed


def run_part(part, size, options):
    """What every rank of ``size`` new processes found in ``part(rank)``: ``{rank: (rows, error)}``, the first that is
    known first. A rank that fails, dies or does not return ends the others."""
    context = mp.get_context("spawn")
    if options.device == "cpu":  # where each process would import torch for longer than most parts run
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.tensor.debug"])
    answers = context.Queue()
    found: dict[int, tuple[list[dict[str, Any]], str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, options, os.path.join(folder, "store"), answers)
        processes = [context.Process(target=_process, args=(part, rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + options.timeout
        while len(found) < size and time.monotonic() < deadline:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
            try:
                rank, rows, error = answers.get(timeout=1)
                found[rank] = rows, error
            except queue.Empty:
                for rank in dead:  # before what the others find when it is gone
                    if rank not in found:
                        found = {rank: ([], f"the process ended with exit code {processes[rank].exitcode}"), **found}
            if any(error for _, error in found.values()):
                deadline = min(deadline, time.monotonic() + 5)  # for those that fail for the same reason
        for process in processes:
            process.join(timeout=10 if len(found) == size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    failed = any(error for _, error in found.values())
    ended = "ended, as another rank failed" if failed else f"did not return within {options.timeout} s"
    return found | {rank: ([], ended) for rank in range(size) if rank not in found}


def merged(name, found):
    """The rows of all ranks as results, one a check."""
    results: dict[str, dict[str, Any]] = {}
    for rank, (rows, error) in found.items():
        if error:
            rows = [*rows, {"check": "runs to its end", "problems": [error], "figures": {}}]
        for row in rows:
            one = results.setdefault(row["check"], {"part": name, "check": row["check"], "outcome": "passed"})
            if "skipped" in row:
                one |= {"outcome": "skipped", "reason": row["skipped"]}
                continue
            if row["problems"]:
                one["outcome"] = "failed"
                one.setdefault("problems", []).extend(f"rank {rank}: {problem}" for problem in row["problems"])
                one.setdefault("reason", f"rank {rank}: {last_line(row['problems'][0])}")
            for key, value in row["figures"].items():
                one.setdefault("figures", {}).setdefault(key, []).append(value)
    return list(results.values())


def last_line(text):
    """Of a traceback, what it is about."""
    return text.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# The demonstration, and its model on meshes of every shape.
# ---------------------------------------------------------------------------------------------------------------------


def demonstration(options):
    """``python -m torch_dtensor_rng`` under both policies; the numbers of one device for any number of processes."""
    size = options.size
    tables = {}
    sizes = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0] + [size]
    if options.device == "cpu":
        sizes = [1, size]  # starting the processes takes longest
    runs = [("offset", size, None), *(("single_device", one, None) for one in dict.fromkeys(sizes))]
    if options.device == "cuda" and size % 2 == 0:
        runs.append(("single_device", size, 1))
    for policy, nproc, tp in runs:
        arguments = ["--device", options.device, "--policy", policy, "--nproc", str(nproc)]
        name = f"{policy}, number of processes {nproc}"
        if tp:
            arguments += ["--tp", str(tp)]
            name += f", tp {tp}"
        command = [sys.executable, "-m", "torch_dtensor_rng", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, cwd=ROOT)
        except subprocess.TimeoutExpired:
            yield {"check": name, "outcome": "failed", "reason": f"did not return within {options.timeout} s"}
            continue
        if done.returncode:
            said = done.stdout + done.stderr or f"exit code {done.returncode}"
            yield {"check": name, "outcome": "failed", "reason": last_line(said), "problems": [said]}
            continue
        yield {"check": name, "outcome": "passed"}
        if policy == "single_device":
            tables[name] = checksums(done.stdout)
    first, *others = tables.values() or [{}]
    problems = [name for other in others for name in first if other.get(name) != first[name]]
    if not others or len(first) < 20:
        problems.append(f"{len(tables)} runs and {len(first)} checksums to compare")
    result = {"check": "the same checksums with any number of processes", "outcome": "failed" if problems else "passed"}
    figures = {"runs": [len(tables)], "checksums": [len(first)]}
    yield result | {"figures": figures} | ({"reason": problems[0]} if problems else {})


def checksums(output):
    """The checksum of every tensor in the demonstration's table, and where rank 0's generator ends."""
    rows = [re.split("  +", line) for line in output.splitlines()]
    ends = [row[-1] for row in rows if row[0].startswith("rank 0 ")]
    return {row[0]: row[-1] for row in rows if len(row) == 8 and row[0] != "name"} | {"the end state": ends}


def models(rank):
    """The demonstration's model under single_device, over meshes of 1, 2, 4... ranks and up to three dims."""
    with rank.device:
        plain = demo.Transformer()
    torch.manual_seed(demo.SEED)
    demo.init_weights(plain)
    end = rank.generator.get_state()
    sizes = [1 << i for i in range(rank.size.bit_length())]
    shapes = [(n,) for n in sizes] + [(n // 2, 2) for n in sizes if n > 1] + [(n // 4, 2, 2) for n in sizes if n > 4]
    for shape in shapes:
        mesh = DeviceMesh(rank.device.type, torch.arange(math.prod(shape)).view(shape))
        if mesh.get_coordinate() is None:
            continue
        with torch.device("meta"):
            model = demo.Transformer()
        for name, parameter in list(model.named_parameters()):
            parent, _, leaf = name.rpartition(".")
            placements = [Shard(0), Shard(1) if parameter.ndim > 1 else Replicate(), Shard(0)][: len(shape)]
            sharded = empty(*parameter.shape, device_mesh=mesh, placements=placements)
            setattr(model.get_submodule(parent), leaf, nn.Parameter(sharded))
        torch.manual_seed(demo.SEED)
        with tdr.install("single_device", strict=True):
            demo.init_weights(model)
        expected = dict(plain.named_parameters())
        problems = [name for name, x in model.named_parameters() if not is_slice(x, expected[name])]
        problems += [] if torch.equal(rank.generator.get_state(), end) else ["the generator ends elsewhere"]
        rank.check(f"the plain model's weights on mesh {shape}", problems, parameters=len(expected))


def is_slice(x, whole):
    """Whether this rank holds of the DTensor ``x`` what ``whole`` has in its place."""
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    expected = whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))]
    return x.to_local().dtype == expected.dtype and torch.equal(x.to_local(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn.
# ---------------------------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16)
INTS = (torch.int64, torch.int32)

# name -> (op(x, generator), dtypes); the same call draws on a plain tensor and on a DTensor.
OPS: dict[str, tuple[Any, tuple[torch.dtype, ...]]] = {
    "uniform_": (lambda x, g: x.uniform_(-0.3, 0.7, generator=g), FLOATS),
    "normal_": (lambda x, g: x.normal_(0.1, 0.02, generator=g), FLOATS),
    "log_normal_": (lambda x, g: x.log_normal_(0.1, 0.5, generator=g), FLOATS),
    "exponential_": (lambda x, g: x.exponential_(1.5, generator=g), FLOATS),
    "cauchy_": (lambda x, g: x.cauchy_(1.0, 2.0, generator=g), FLOATS),
    "geometric_": (lambda x, g: x.geometric_(0.05, generator=g), FLOATS),
    "random_": (lambda x, g: x.random_(100, generator=g), (*FLOATS, *INTS)),
    "bernoulli_": (lambda x, g: x.bernoulli_(0.4, generator=g), (*FLOATS, *INTS)),
    "rand_like": (lambda x, g: torch.rand_like(x, **given(g)), FLOATS),
    "randn_like": (lambda x, g: torch.randn_like(x, **given(g)), FLOATS),
    "randint_like": (lambda x, g: torch.randint_like(x, 1000, **given(g)), INTS),
    "native_dropout": (lambda x, g: torch.native_dropout(x, 0.4, True), FLOATS),
    "F.dropout": (lambda x, g: F.dropout(x, 0.4), FLOATS),
}


def given(generator):
    return {} if generator is None else {"generator": generator}


def layouts(rank):
    """name -> (shape, mesh, placements)."""
    n, line, plane = rank.size, rank.line(), rank.plane()
    found = {
        "rows": ((4 * n, 33), line, [Shard(0)]),
        "columns": ((24, 8 * n), line, [Shard(1)]),
        "rows and columns": ((4 * n, 32), plane, [Shard(0), Shard(1)]),
        "rows twice": ((4 * n, 33), plane, [Shard(0), Shard(0)]),
        "replicated rows": ((16, 25), plane, [Replicate(), Shard(0)]),
        "uneven rows": ((3 * n - 1, 7), line, [Shard(0)]),
        "uneven rows and columns": ((2 * n + 1, 9), plane, [Shard(0), Shard(1)]),
        "empty shards": ((1, 40), line, [Shard(0)]),
    }
    if rank.device.type == "cuda":  # past the sizes at which the kernels' launches change
        found["long rows"] = ((1000 * n + 1, 512), line, [Shard(0)])
        found["long columns"] = ((3000, 256 * n), line, [Shard(1)])
        found["long unaligned columns"] = ((3001, 999), plane, [Shard(0), Shard(1)])
    return found


def drawn(rank, op, x, passes):
    """What ``op`` draws into ``x``, and where the default and the passed generator end."""
    torch.manual_seed(SEED)
    torch.rand(5, device=rank.device)  # away from the seed's first number
    generator = torch.Generator(rank.device).manual_seed(SEED + 1) if passes else None
    out = op(x, generator)
    ends = [one.get_state() for one in (rank.generator, generator) if one is not None]
    return out if isinstance(out, tuple) else (out,), ends


def cases(rank, name, dtypes):
    """Of an op: in words, a plain tensor and a function that makes it a DTensor, and whether a generator is passed."""
    for (layout, (shape, mesh, placements)), dtype in itertools.product(layouts(rank).items(), dtypes):
        whole = torch.ones(shape, dtype=dtype, device=rank.device)
        distribute = functools.partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)
        for passes in (False,) if "dropout" in name else (False, True):
            text = f"{layout}, {str(dtype).removeprefix('torch.')}{', generator=' if passes else ''}"
            yield text, whole, distribute, passes


def exactness(rank):
    """Under single_device a shard is the slice of what the plain op draws, and generators end where it leaves them."""
    with tdr.install("single_device", strict=True):
        for name, (op, dtypes) in OPS.items():
            problems, count = [], 0
            for text, whole, distribute, passes in cases(rank, name, dtypes):
                plain, plain_ends = drawn(rank, op, whole.clone(), passes)
                ours, our_ends = drawn(rank, op, distribute(whole.clone()), passes)
                if not all(map(is_slice, ours, plain)):
                    problems.append(f"{text}: other numbers than the plain op's")
                if not all(map(torch.equal, our_ends, plain_ends)):
                    problems.append(f"{text}: ends elsewhere than the plain op")
                count += 1
            rank.check(f"{name} is the plain op's", problems, cases=count)


def offset(rank):
    """Under policy offset shards differ, replicas agree, and every rank ends in one state."""
    with tdr.install("offset"):
        for name, (op, dtypes) in OPS.items():
            found = []
            for text, whole, distribute, passes in cases(rank, name, dtypes):
                outs, ends = drawn(rank, op, distribute(whole.clone()), passes)
                coordinate = outs[-1].device_mesh.get_coordinate()
                shard = tuple(c for c, p in zip(coordinate, outs[-1].placements) if p.is_shard())
                local = outs[-1].to_local()
                found.append((text, shard, digest(local) if local.numel() >= 64 else None, digest(*ends)))
            problems, pairs = [], 0
            for of_ranks in zip(*rank.gather(found)):
                text, contents = of_ranks[0][0], {}
                for _, shard, one, _ in of_ranks:
                    contents.setdefault(shard, set()).add(one)
                if any(len(of_shard) > 1 for of_shard in contents.values()):
                    problems.append(f"{text}: replicas differ")
                values = [one for of_shard in contents.values() for one in of_shard if one]
                if len(set(values)) < len(values):
                    problems.append(f"{text}: shards hold the same")
                if len({end for *_, end in of_ranks}) > 1:
                    problems.append(f"{text}: ranks end in different states")
                pairs += math.comb(len(values), 2)
            if rank.size > 1 and not pairs:
                problems.append("no two shards were compared")
            rank.check(f"{name} is disjoint and in step", problems, pairs=pairs)


def digest(*tensors):
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def silence(rank):
    """No draw communicates."""
    for policy in POLICIES:
        with tdr.install(policy):
            for name, (op, dtypes) in OPS.items():
                problems, count = [], 0
                for text, whole, distribute, passes in cases(rank, name, dtypes[:1]):
                    x = distribute(whole)
                    with CommDebugMode() as communication:
                        drawn(rank, op, x, passes)
                    if communication.get_total_counts():
                        problems.append(f"{text}: {dict(communication.get_comm_counts())}")
                    count += 1
                rank.check(f"{name} under {policy} communicates nothing", problems, draws=count)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that drift.
# ---------------------------------------------------------------------------------------------------------------------


def caught(call):
    try:
        call()
    except tdr.RNGDesyncError as error:
        return error
    return None


def misses(rank, error, odd):
    """What ``error`` does not say of the rank that is out of step."""
    if error is None:
        return ["the drift was not found"]
    apart = [one for one, state in error.states.items() if state == error.states.get(odd)]
    problems = [] if apart == [odd] else [f"rank {odd} is out of step, found {apart}"]
    problems += [] if sorted(error.states) == list(range(rank.size)) else [f"the states of {sorted(error.states)}"]
    if rank.size > 2 and f"The odd one out: rank {odd}" not in str(error):
        problems.append(f"rank {odd} is not named in {error}")
    return problems


def drift(rank):
    """``check_rng_sync`` and ``RNGSyncDebugMode`` pass in step, and name a rank that has drawn alone."""
    mesh, odd = rank.plane(), rank.size - 1
    passed = torch.Generator(rank.device)

    def draw_alone(generator=None):
        if rank.rank == odd:
            torch.rand(1, device=rank.device, generator=generator)

    def expect(name, call, drifted):
        if drifted and rank.size < 2:
            return rank.skip(name, "one rank cannot be out of step")
        error = caught(call)
        rank.check(name, misses(rank, error, odd) if drifted else [str(error)] * (error is not None))

    for name, generator in (("default", None), ("passed", passed)):
        torch.manual_seed(SEED)
        passed.manual_seed(SEED)
        call = functools.partial(tdr.check_rng_sync, mesh, generator)
        expect(f"the {name} generator in step", call, False)
        draw_alone(generator)
        expect(f"the {name} generator, drifted", call, True)

    for policy in POLICIES:
        x = empty(4 * rank.size, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)]).fill_(1)
        for name in ("uniform_", "native_dropout"):
            torch.manual_seed(SEED)
            with tdr.install(policy), tdr.RNGSyncDebugMode(history=2):
                call = functools.partial(OPS[name][0], x, None)
                expect(f"debug mode around {name} under {policy}, in step", call, False)
                draw_alone()
                expect(f"debug mode around {name} under {policy}, drifted", call, True)


# ---------------------------------------------------------------------------------------------------------------------
# Training.
# ---------------------------------------------------------------------------------------------------------------------

BATCH, LENGTH, WIDTH, HEADS, DROPPED = 8, 8, 32, 4, 0.2


class Block(nn.Module):
    """A transformer block, on this rank's part of the batch, and of the heads and hidden units.

    Args:
        mesh: that of the batch and of tensor parallelism; None for the whole on one device.
    """

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def dropout(self, x, placement):
        """Of the activation of the whole batch, of which ``x`` is this rank's part."""
        if self.mesh is None:
            return F.dropout(x, DROPPED)
        return F.dropout(DTensor.from_local(x, self.mesh, [Shard(0), placement], run_check=False), DROPPED).to_local()

    def forward(self, x):
        normed = self.attention_norm(x)
        q, k, v = (
            linear(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1)
        attended = self.dropout(weights, Shard(1)) @ v
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(-2)), Replicate())
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x))), Shard(2)))


TENSOR_PARALLEL = {
    **{name: ColwiseParallel for name in ("query", "key", "value", "up")},
    **{name: RowwiseParallel for name in ("out", "down")},
}


def build(rank, mesh, dtype, compiled=False):
    """The model with its values, and its optimizer; FSDP2 over tensor parallelism unless ``mesh`` is None."""
    with torch.device("meta"):
        model = nn.Sequential(Block(mesh), Block(mesh), nn.Linear(WIDTH, WIDTH)).to(dtype)
    if mesh is not None:
        for block in model[:2]:
            parallelize_module(block, mesh["tp"], {name: style() for name, style in TENSOR_PARALLEL.items()})
            if compiled:
                block.compile(fullgraph=True, backend="inductor" if rank.device.type == "cuda" else "aot_eager")
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for module in (*model[:2], model):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    model.to_empty(device=rank.device)
    torch.manual_seed(SEED)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses(rank, model, optimizer, mesh, dtype, steps):
    """The loss of the whole batch at each of ``steps``. The batches are beside the generators."""
    dp, index = (mesh.size(0), mesh.get_local_rank("dp")) if mesh is not None else (1, 0)
    numbers = torch.arange(BATCH * LENGTH * WIDTH, dtype=dtype, device=rank.device).view(BATCH, LENGTH, WIDTH)
    found = []
    for step in steps:
        x, expected = (torch.sin(numbers * f + step).chunk(dp)[index] for f in (0.3, 0.1))
        loss = F.mse_loss(model(x), expected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found = torch.stack(found)
    if mesh is not None:
        dist.all_reduce(found, group=mesh.get_group("dp"))
    return (found / dp).tolist()


def last_mask(rank, mesh):
    """The digest of a mask of the whole, drawn after the last step, and of where the generator ends."""
    mask = torch.ones(BATCH, 6, WIDTH, device=rank.device)
    if mesh is None:
        mask = F.dropout(mask)
    else:
        x = F.dropout(distribute_tensor(mask, mesh, [Shard(0), Shard(2)], src_data_rank=None))
        place = compute_local_shape_and_global_offset(x.shape, mesh, x.placements)
        for (shape, offset), local in rank.gather((place, x.to_local().cpu())):
            mask[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))] = local.to(rank.device)
    return digest(mask), digest(rank.generator.get_state())


def difference(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


# Losses agree to rounding: AdamW's quotients make more of it from step to step.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
MODES = (("eager", torch.float64), ("compiled", torch.float64), ("compiled", torch.float32))


def training(rank):
    """FSDP2 over tensor parallelism with dropout has the losses and masks of one device, eager and compiled."""
    steps, half, mesh = range(rank.options.steps), rank.options.steps // 2, rank.plane()
    plain = {}
    for mode, dtype in MODES if rank.device.type == "cuda" else MODES[:2]:
        if dtype not in plain:
            run = losses(rank, *build(rank, None, dtype), None, dtype, steps)
            plain[dtype] = run, last_mask(rank, None)
        with tdr.install("single_device", strict=True):
            model, optimizer = build(rank, mesh, dtype, mode == "compiled")
            ours = losses(rank, model, optimizer, mesh, dtype, steps[:half])
            if (mode, dtype) == MODES[0]:
                dcp.save(state_of(model, optimizer, mesh), checkpoint_id=f"{rank.options.folder}/half")
            ours += losses(rank, model, optimizer, mesh, dtype, steps[half:])
            tdr.check_rng_sync(mesh)
            mask = last_mask(rank, mesh)
        if (mode, dtype) == MODES[0] and rank.rank == 0:
            (rank.options.folder / "whole.json").write_text(json.dumps([ours, mask]))
        theirs, their_mask = plain[dtype]
        apart = difference(ours, theirs)
        problems = [] if apart < TOLERANCE[dtype] else [f"{apart:.1e} from the losses of one device"]
        problems += [] if len(set(theirs)) == len(steps) and theirs[-1] < theirs[0] else ["nothing was learnt"]
        name = f"{mode} in {str(dtype).removeprefix('torch.')}"
        rank.check(f"{name}: the losses of one device", problems, steps=len(steps), apart=apart)
        masks = [what for what, a, b in zip(("the mask", "the end state"), mask, their_mask) if a != b]
        rank.check(f"{name}: the last mask and end state of one device", masks)


def state_of(model, optimizer, mesh):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "rng": tdr.RNGState(device_mesh=mesh)}


def resuming(rank):
    """The run that was saved at half of its steps goes on on half of the ranks."""
    expected, their_mask = json.loads((rank.options.folder / "whole.json").read_text())
    half = rank.options.steps // 2
    mesh = rank.plane()
    with tdr.install("single_device", strict=True):
        model, optimizer = build(rank, mesh, torch.float64)
        torch.manual_seed(SEED + 1000)  # what is loaded counts
        state = state_of(model, optimizer, mesh)
        dcp.load(state, checkpoint_id=f"{rank.options.folder}/half")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        ours = losses(rank, model, optimizer, mesh, torch.float64, range(half, rank.options.steps))
        mask = last_mask(rank, mesh)
    apart = difference(ours, expected[half:])
    problems = [] if apart < TOLERANCE[torch.float64] else [f"{apart:.1e} from the losses of the uninterrupted run"]
    rank.check(f"resumed on {rank.size} ranks: the losses go on", problems, steps=len(ours), apart=apart)
    masks = [what for what, a, b in zip(("the mask", "the end state"), mask, their_mask) if a != b]
    rank.check(f"resumed on {rank.size} ranks: the last mask and end state", masks)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA alone.
# ---------------------------------------------------------------------------------------------------------------------


def speed(rank):
    """A small op and a fill of rows under both policies against the plain op, with all ranks at work at once."""
    mesh = rank.line()

    def seconds(call, number):
        """Until the last of the calls is launched, and until it is done; a call."""
        for _ in range(number // 4 + 3):
            call()
        times = []
        for _ in range(5):
            rank.synchronize()
            begin = time.perf_counter()
            for _ in range(number):
                call()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            times.append((host / number, (time.perf_counter() - begin) / number))
        return [statistics.median(one) for one in zip(*times)]

    for name in ("uniform_", "normal_"):
        op = functools.partial(OPS[name][0], g=None)
        for what, shape, number in (("host cost", (256,), 500), ("bandwidth", (8192, 16384), 20)):
            local = torch.empty(shape, device=rank.device)
            x = empty(rank.size * shape[0], *shape[1:], device_mesh=mesh, placements=[Shard(0)])
            which = 0 if what == "host cost" else 1
            plain = seconds(functools.partial(op, local), number)[which]
            gigabytes = local.numel() * local.element_size() / 1e9
            figures = {"plain us": plain * 1e6} if which == 0 else {"plain GB/s": gigabytes / plain}
            for policy in POLICIES:
                with tdr.install(policy):
                    figures[f"{policy} / plain time"] = seconds(functools.partial(op, x), number)[which] / plain
            rank.check(f"{what} of {name}, {local.numel()} local elements", [], **figures)


def graphs(rank):
    """A captured step under single_device draws at each replay what the eager step draws, and ends where it ends."""
    if importlib.util.find_spec("torch_dtensor_rng._capture") is None:
        return rank.skip("replays", "the package captures no draws yet")
    for layout, (shape, mesh, placements) in layouts(rank).items():
        ones = distribute_tensor(torch.ones(shape, device=rank.device), mesh, placements, src_data_rank=None)
        filled = ones.clone()

        def step():
            filled.normal_()  # noqa: B023
            return [filled.to_local(), F.dropout(ones, 0.4).to_local(), torch.rand(3, device=rank.device)]  # noqa: B023

        problems = []
        with tdr.install("single_device", strict=True):
            torch.manual_seed(SEED)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog thread makes calls of its own while this one captures.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = step()
            for replay in range(3):
                before = rank.generator.get_state()
                graph.replay()
                ours, end = [one.clone() for one in captured], rank.generator.get_state()
                rank.generator.set_state(before)
                if not all(map(torch.equal, ours, step())):
                    problems.append(f"replay {replay} draws other numbers than the eager step")
                if not torch.equal(end, rank.generator.get_state()):
                    problems.append(f"replay {replay} ends elsewhere than the eager step")
        rank.check(f"replays of {layout}", problems, replays=3)


# ---------------------------------------------------------------------------------------------------------------------
# All of it.
# ---------------------------------------------------------------------------------------------------------------------

# The stages of each part, and into how many the ranks are divided for it.
PARTS: dict[str, list[tuple[Any, int]]] = {
    "demonstration": [],  # starts its processes itself
    "models": [(models, 1)],
    "exactness": [(exactness, 1)],
    "offset": [(offset, 1)],
    "silence": [(silence, 1)],
    "drift": [(drift, 1)],
    "training": [(training, 1), (resuming, 2)],
    "speed": [(speed, 1)],
    "graphs": [(graphs, 1)],
}


def results_of(name, options):
    if name in ("speed", "graphs") and options.device == "cpu":
        yield {"part": name, "check": name, "outcome": "skipped", "reason": "for CUDA alone"}
        return
    if name == "demonstration":
        for result in demonstration(options):
            yield {"part": name, **result}
    for stage, fraction in PARTS[name]:
        yield from merged(name, run_part(stage, max(1, options.size // fraction), options))


def line(result):
    """A result in words."""
    text = [f"{result['outcome']:8}{result['part']}: {result['check']}"]
    for key, values in result.get("figures", {}).items():
        least, most = f"{min(values):.4g}", f"{max(values):.4g}"
        text.append(f"{key} {least}" if least == most else f"{key} {least} to {most}")
    return "; ".join(text) + (f": {result['reason']}" if "reason" in result else "")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.device_count() else "cpu")
    parser.add_argument("--processes", type=int, default=4, help="ranks without a GPU of their own (default: 4)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--steps", type=int, default=50, help="of training (default: 50)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each part (default: 300)")
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args(arguments)

    count = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and not count:
        parser.error("--device cuda needs a CUDA device, and torch sees none")
    if options.processes < 1 or options.steps < 2:
        parser.error("--processes has to be 1 or more, and --steps 2 or more")
    options.backend = "nccl" if count > 1 else "gloo"
    options.size = count if count > 1 else options.processes
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast, in the processes that are started
    where = torch.cuda.get_device_name() if count else "the CPU"
    about = f"torch {torch.__version__}, {options.size} ranks over {options.backend} on {max(count, 1)} x {where}"
    print(about, flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        options.folder = pathlib.Path(folder)
        for name in options.parts:
            begin = time.monotonic()
            for result in results_of(name, options):
                results.append(result)
                print(line(result), flush=True)
                for problem in result.get("problems", []):
                    print(problem, file=sys.stderr, flush=True)
            print(f"{'':8}{name}: {time.monotonic() - begin:.0f} s", flush=True)
    outcomes = [result["outcome"] for result in results]
    print(", ".join(f"{outcomes.count(one)} {one}" for one in ("passed", "failed", "skipped")))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"about": about, "results": results}, indent=1))
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
