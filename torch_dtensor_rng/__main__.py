"""``python -m torch_dtensor_rng``: several processes initialise a sharded transformer, and compare what they hold.

Every process builds the model on the meta device, shards it by tensor parallelism and FSDP2, initialises it with plain
``torch.nn.init`` calls and reports digests. Rank 0 prints them as a table and checks what the package promises. With
``--policy single_device`` the checksums of whole tensors are the same for any number of processes and any ``--tp``.
"""

import argparse
import datetime
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_dtensor_rng as tdr
from torch_dtensor_rng._install import POLICIES
from torch_dtensor_rng._shard import held_ranges

SEED = 1234
DIM, HEADS, HIDDEN, LENGTH, BATCH = 64, 4, 256, 16, 8
VOCABULARY = 99  # odd, so that the shards are uneven


# ---------------------------------------------------------------------------------------------------------------------
# The model, and its initialisation.
# ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, 3, DIM // HEADS))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(-2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(self.dropout(F.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.shift = nn.Parameter(torch.empty(1))  # one element, so that some shards are empty

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.shift)


CONSTANT = ("ones_", "zeros_")

# For each parameter, by how its name ends: the function of torch.nn.init, and its arguments.
INIT: dict[str, tuple[str, dict[str, Any]]] = {
    "norm.weight": ("ones_", {}),
    "norm.bias": ("zeros_", {}),
    "tokens.weight": ("normal_", {"std": 0.02}),
    "positions.weight": ("normal_", {"std": 0.02}),
    "qkv.weight": ("xavier_uniform_", {}),
    "out.weight": ("xavier_normal_", {}),
    "up.weight": ("kaiming_uniform_", {"nonlinearity": "relu"}),
    "down.weight": ("kaiming_normal_", {"nonlinearity": "linear"}),
    # Bounds that some values miss at first, so that it draws again.
    "head.weight": ("trunc_normal_", {"std": 0.02, "a": -0.04, "b": 0.04}),
    "bias": ("uniform_", {"a": -0.1, "b": 0.1}),
    "shift": ("uniform_", {}),
}


def init_of(name: str) -> tuple[str, dict[str, Any]]:
    return next(rule for ending, rule in INIT.items() if name.endswith(ending))


def init_weights(model: nn.Module, generator: torch.Generator | None = None) -> None:
    for name, parameter in model.named_parameters():
        function, options = init_of(name)
        if function not in CONSTANT:
            options = {**options, "generator": generator}
        getattr(nn.init, function)(parameter, **options)


def build(mesh: DeviceMesh, device: torch.device) -> Transformer:
    """The model, sharded and without values."""
    with torch.device("meta"):
        model = Transformer()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(use_local_output=False),  # so that dropout gets a DTensor
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(),  # the logits stay sharded, as for a parallel loss
    }
    parallelize_module(model, mesh["tp"], plan)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    model.to_empty(device=device)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# What a rank reports: plain data.
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """One DTensor, and what a rank holds of it.

    Attributes:
        shard: the rank's mesh coordinates on the mesh dims that shard; replicas have the same.
        digest: of the whole local tensor.
        head: of its first values alone, as many on every rank: shards of two sizes differ in ``digest`` anyway.
        checksum: the digest of the whole tensor, cut short.
    """

    name: str
    init: str
    shape: tuple[int, ...]
    placements: str
    num_shards: int
    shard: tuple[int, ...]
    numel: int
    digest: str
    head: str
    checksum: str

    @property
    def constant(self) -> bool:
        return self.init in CONSTANT


@dataclass(frozen=True)
class Report:
    """What one rank saw.

    Attributes:
        place: the rank's mesh coordinates.
        first: the parameters after the first init, with the default generator ``before`` and ``after`` it.
        again: their digests after the same init from the same seed.
        passed: their digests after an init with ``generator=``; ``passed_after`` is that generator after it, and
            ``kept`` and ``kept_after`` the default generator around it.
        masks: the dropout masks, with the default generator ``trained`` after them.
    """

    place: str
    first: tuple[Held, ...]
    before: str
    after: str
    again: tuple[str, ...]
    passed: tuple[str, ...]
    passed_after: str
    kept: str
    kept_after: str
    masks: tuple[Held, ...]
    trained: str


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def state_of(generator: torch.Generator) -> str:
    if generator.device.type == "cpu":
        return digest_of(generator.get_state())
    return f"seed {generator.initial_seed()}, offset {generator.get_offset()}"


def whole(x: DTensor) -> torch.Tensor:
    """The whole tensor, on the CPU: full_tensor() is of no use where processes share a GPU, as gloo gathers no CUDA tensors."""
    coordinate: Sequence[int] = x.device_mesh.get_coordinate() or []
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (held_ranges(x._spec, coordinate), x.to_local().detach().cpu()))
    gathered = torch.empty(x.shape, dtype=x.dtype)
    for ranges, local in parts:
        indices = [torch.cat([torch.arange(*one) for one in [(0, 0), *of_dim]]) for of_dim in ranges]
        gathered[torch.meshgrid(*indices, indexing="ij")] = local
    return gathered


def held(name: str, init: str, x: torch.Tensor) -> Held:
    assert isinstance(x, DTensor), name
    local = x.to_local()
    coordinate = x.device_mesh.get_coordinate() or ()
    sharding = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    num_shards = 1
    for mesh_dim in sharding:
        num_shards *= x.device_mesh.size(mesh_dim)
    names = x.device_mesh.mesh_dim_names or ()
    return Held(
        name=name,
        init=init,
        shape=tuple(x.shape),
        placements=", ".join(f"{dim} {placement}" for dim, placement in zip(names, x.placements)),
        num_shards=num_shards,
        shard=tuple(coordinate[i] for i in sharding),
        numel=local.numel(),
        digest=digest_of(local),
        head=digest_of(local.flatten()[: max(1, x.numel() // (2 * num_shards))]),
        checksum=digest_of(whole(x))[:8],
    )


def parameters(model: nn.Module) -> tuple[Held, ...]:
    return tuple(held(name, init_of(name)[0], parameter) for name, parameter in model.named_parameters())


def digests(tensors: Sequence[Held]) -> tuple[str, ...]:
    return tuple(one.digest for one in tensors)


def dropout_masks(model: Transformer, mesh: DeviceMesh, device: torch.device) -> tuple[Held, ...]:
    """The masks of a block's dropout: in a forward pass, and on an activation that is sharded over the whole mesh."""
    masks: list[torch.Tensor] = []
    dropout = model.get_submodule("blocks.0.dropout")
    hooks = [
        dropout.register_forward_pre_hook(lambda module, args: torch.ones_like(args[0])),  # gelu makes zeros too
        dropout.register_forward_hook(lambda module, args, out: masks.append(out != 0)),
    ]
    model.train()
    with torch.no_grad():
        model(torch.arange(BATCH * LENGTH, device=device).view(BATCH, LENGTH) % VOCABULARY)
        activation = torch.ones(BATCH, LENGTH, HIDDEN, device=device)
        dropout(distribute_tensor(activation, mesh, [Shard(0), Shard(2)], src_data_rank=None))
    for hook in hooks:
        hook.remove()
    names = ("dropout in forward", "dropout over dp and tp")
    return tuple(held(name, "mask", mask) for name, mask in zip(names, masks))


def observe(mesh: DeviceMesh, device: torch.device) -> Report:
    """Everything that a rank does and reports. Nothing in here compares ranks."""
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    model = build(mesh, device)
    torch.manual_seed(SEED)
    before = state_of(default)
    init_weights(model)
    first, after = parameters(model), state_of(default)

    torch.manual_seed(SEED)
    init_weights(model)
    again = digests(parameters(model))

    kept = state_of(default)
    generator = torch.Generator(device).manual_seed(SEED)
    init_weights(model, generator)
    passed, passed_after, kept_after = digests(parameters(model)), state_of(generator), state_of(default)

    masks = dropout_masks(model, mesh, device)
    place = ", ".join(f"{name} {index}" for name, index in zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or ()))
    return Report(
        place, first, before, after, again, passed, passed_after, kept, kept_after, masks, trained=state_of(default)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The checks: plain functions of the reports of all ranks.
# ---------------------------------------------------------------------------------------------------------------------


def shards_distinct(held_by_rank: Sequence[Held]) -> bool | None:
    """Whether no two shards begin with the same values; None where there is nothing to compare."""
    heads = {one.shard: one.head for one in held_by_rank if one.numel and not one.constant}
    return None if len(heads) < 2 else len(set(heads.values())) == len(heads)


def replicas_agree(held_by_rank: Sequence[Held]) -> bool | None:
    """Whether all ranks hold the same of each shard; None where no shard is held twice."""
    contents: dict[tuple[int, ...], set[str]] = {}
    for one in held_by_rank:
        contents.setdefault(one.shard, set()).add(one.digest)
    return None if len(contents) == len(held_by_rank) else all(len(found) == 1 for found in contents.values())


def rows(reports: Sequence[Report]) -> list[list[Held]]:
    """For each tensor, what every rank holds of it."""
    return [list(row) for row in zip(*([*report.first, *report.masks] for report in reports))]


def claims(reports: Sequence[Report]) -> list[tuple[str, bool]]:
    """What is said of the run as a whole, and whether it holds."""
    return [
        ("the init moved the generator on every rank", all(one.before != one.after for one in reports)),
        ("the generator was the same on all ranks before the init", _one({one.before for one in reports})),
        ("the generator is the same on all ranks after the init", _one({one.after for one in reports})),
        (
            "the init after reseeding gives equal parameters",
            all(one.again == digests(one.first) for one in reports),
        ),
        (
            "the init with generator= gives the parameters of the default generator",
            all(one.passed == digests(one.first) for one in reports),
        ),
        (
            "the init with generator= leaves that generator where the default one was left",
            all(one.passed_after == one.after for one in reports),
        ),
        (
            "the init with generator= leaves the default one untouched",
            all(one.kept == one.kept_after for one in reports),
        ),
        ("dropout in train mode moved the generator on every rank", all(one.trained != one.kept for one in reports)),
        ("the generator is the same on all ranks after dropout", _one({one.trained for one in reports})),
    ]


def _one(values: set[str]) -> bool:
    return len(values) == 1


def failures(reports: Sequence[Report]) -> list[str]:
    """All that does not hold, as text."""
    found = []
    for row in rows(reports):
        if shards_distinct(row) is False:
            found.append(f"{row[0].name}: shards are not distinct")
        if replicas_agree(row) is False:
            found.append(f"{row[0].name}: replicas do not agree")
    return found + [f"not so: {claim}" for claim, holds in claims(reports) if not holds]


# ---------------------------------------------------------------------------------------------------------------------
# What is printed.
# ---------------------------------------------------------------------------------------------------------------------


def _answer(holds: bool | None) -> str:
    return "-" if holds is None else "yes" if holds else "NO"


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def render(reports: Sequence[Report]) -> str:
    lines = [["name", "init", "global shape", "placements", "shards", "distinct", "agree", "checksum"]]
    for row in rows(reports):
        one = row[0]
        distinct = "const" if one.constant else _answer(shards_distinct(row))
        shape = "x".join(map(str, one.shape))
        agree = _answer(replicas_agree(row))
        lines.append([one.name, one.init, shape, one.placements, str(one.num_shards), distinct, agree, one.checksum])
    generators = [["default generator", "before the init", "after the init"]]
    generators += [
        [f"rank {rank} ({report.place})", report.before, report.after] for rank, report in enumerate(reports)
    ]
    promises = [[claim, _answer(holds)] for claim, holds in claims(reports)]
    legend = (
        "S(d): sharded along d; _S(d, n): along d within each of the n shards of a later mesh dim; R: replicated;\n"
        "distinct: no two shards hold the same; agree: replicas do; checksum: of the whole tensor;\n"
        "const: initialised to a constant; -: nothing to compare"
    )
    return "\n\n".join([_table(lines) + "\n" + legend, _table(generators), _table(promises)])


# ---------------------------------------------------------------------------------------------------------------------
# The processes.
# ---------------------------------------------------------------------------------------------------------------------


def backend_for(device_type: str, nproc: int) -> str:
    """The backend of the process group.

    Raises:
        ValueError: the machine has not the devices for it.
    """
    if device_type == "cpu":
        return "gloo"
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError("--device cuda needs a CUDA device, and torch sees none")
    if count >= nproc:
        return "nccl"
    if nproc % count:
        raise ValueError(f"--nproc {nproc} cannot be spread evenly over {count} CUDA devices")
    return "gloo"  # NCCL refuses two ranks on one device


def _process(rank: int, options: argparse.Namespace, backend: str, store: str, answer: Any) -> None:
    torch.set_num_threads(1)
    nproc, tp = options.nproc, options.tp
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.cuda.init()  # there are no default generators before
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, nproc),
        rank=rank,
        world_size=nproc,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh(options.device, (nproc // tp, tp), mesh_dim_names=("dp", "tp"))
    with tdr.install(options.policy):
        report = observe(mesh, device)
    reports: list[Any] = [None] * nproc
    dist.all_gather_object(reports, report)
    if rank == 0:
        print(
            f"torch {torch.__version__}, {nproc} processes over {backend} on {options.device}, "
            f"mesh dp {mesh.size(0)} x tp {mesh.size(1)}, policy {options.policy}, seed {SEED}\n"
        )
        print(render(reports), flush=True)
        answer.put(failures(reports))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may still hold tensors, and abort a Python that is shutting down (PyTorch pull request 179291).
    os._exit(0)


def run(options: argparse.Namespace, backend: str, process: Callable[..., None] = _process) -> int:
    """Runs the processes, prints the verdict and returns the exit code."""
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(process, (options, backend, os.path.join(folder, "store"), answer), options.nproc)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(f"rank {error.error_index} failed: {error}", file=sys.stderr)
            return 1
    found = answer.get()
    print("\n" + ("\n".join(["does not hold:", *found]) if found else "all of it holds"))
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_dtensor_rng", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=4, help="number of processes (default: 4)")
    parser.add_argument("--tp", type=int, help="how many of them share a layer (default: 2 if --nproc is even, else 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is (default: cpu)")
    parser.add_argument("--policy", choices=POLICIES, default="offset", help="of install() (default: offset)")
    options = parser.parse_args(arguments)
    if options.nproc < 1:
        parser.error(f"--nproc has to be 1 or more, found {options.nproc}")
    if options.tp is None:
        options.tp = 2 if options.nproc % 2 == 0 else 1
    if options.tp < 1 or options.nproc % options.tp or HEADS % options.tp:
        parser.error(f"--tp has to divide --nproc {options.nproc} and the model's {HEADS} heads, found {options.tp}")
    try:
        backend = backend_for(options.device, options.nproc)
    except ValueError as error:
        parser.error(str(error))
    return run(options, backend)


if __name__ == "__main__":
    # By its full name, as spawned processes cannot find functions of a package's "__main__".
    from torch_dtensor_rng.__main__ import main as _main

    sys.exit(_main())
