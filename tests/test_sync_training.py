"""No false alarm in training: pipeline stages, FSDP2 and tensor parallelism, with dropout, over real processes; and a
rank that drifts in it is named by its own stage, and by that alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from worlds import gloo

import torch_dtensor_rng as tdr

BATCH, SEQUENCE, WIDTH, STEPS = 4, 4, 8, 50
SEED = 11
STAGES = [range(4), range(4, 8)]
# The dropouts of a step on one stage: of the input, and in each block that of the hidden activations and of the output.
DRAWS_PER_STEP = 1 + 2 * 2


class Block(nn.Module):
    """Sequence-parallel outside, tensor-parallel inside."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.hidden_dropout = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        hidden = self.hidden_dropout(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.down(hidden))


class Stage(nn.Module):
    """What a pipeline stage holds; takes and gives the local part of activations that are sharded on (dp, tp)."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, local):
        x = DTensor.from_local(local, self.mesh, [Shard(0), Shard(1)], run_check=False)
        local = nn.functional.dropout(x, 0.1).to_local()
        x = DTensor.from_local(local, self.mesh["tp"], [Shard(1)], run_check=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.to_local()


def parallel_stage(mesh):
    """A stage on its (dp, tp) mesh, its parameters drawn as DTensors."""
    with torch.device("meta"):
        stage = Stage(mesh)
    for block in stage.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    stage.to_empty(device="cpu")
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2
        if name.endswith("weight") and parameter.ndim == 2:
            nn.init.trunc_normal_(parameter, std=0.3)
        else:
            nn.init.uniform_(parameter, -0.1, 0.1)
    return stage


def step(rank, stage, optimizer, inputs, *, forward_only=False):
    """One training step of this rank's stage; activations and their gradients go between a rank and its namesake."""
    first = rank in STAGES[0]
    if first:
        out = stage(inputs)
        dist.send(out.detach(), rank + 4)
        if forward_only:
            return
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 4)
        out.backward(gradient)
    else:
        x = torch.empty_like(inputs)
        dist.recv(x, rank - 4)
        loss = (stage(x.requires_grad_()) - inputs).square().mean()
        loss.backward()
        dist.send(x.grad, rank - 4)
    optimizer.step()
    optimizer.zero_grad()


def caught(check):
    """What is raised, as plain data."""
    try:
        check()
    except tdr.RNGDesyncError as error:
        return str(error), {rank: tuple(state) for rank, state in error.states.items()}
    return None


def seeded(world):
    tdr.manual_seed(SEED, world, distinct_dims=("pp",))
    stage = parallel_stage(world["dp", "tp"])
    local = torch.linspace(-1, 1, BATCH * SEQUENCE * WIDTH).view(BATCH, SEQUENCE, WIDTH)
    for dim, name in enumerate(("dp", "tp")):
        local = local.chunk(2, dim)[world.get_local_rank(name)]
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-3), local.contiguous()


def a_whole_run(rank, world):
    stage, optimizer, inputs = seeded(world)
    start = torch.get_rng_state()
    for _ in range(STEPS):
        step(rank, stage, optimizer, inputs)
    end = torch.get_rng_state()
    finite = all(bool(one.to_local().isfinite().all()) for one in stage.parameters())
    return {
        "start": start,
        "end": end,
        "finite": finite,
        "own": caught(lambda: tdr.check_rng_sync(world["dp", "tp"])),
        "world": caught(lambda: tdr.check_rng_sync(world)),
    }


def a_rank_that_drifts(rank, world, at):
    """``at`` draws one number of its own before the third step, in which each stage only does what it can."""
    stage, optimizer, inputs = seeded(world)
    for _ in range(2):
        step(rank, stage, optimizer, inputs)
    if rank == at:
        torch.rand(1)
    found = None
    # Nothing comes from a first stage that has drifted, nor goes back to it from a last one that has.
    if rank in STAGES[0] or at in STAGES[1]:
        found = caught(lambda: step(rank, stage, optimizer, inputs, forward_only=True))
    return found, caught(lambda: tdr.check_rng_sync(world["dp", "tp"]))


DRIFTERS = (1, 6)


def train(rank):
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with tdr.install(), tdr.RNGSyncDebugMode(history=4):
        return a_whole_run(rank, world), {at: a_rank_that_drifts(rank, world, at) for at in DRIFTERS}


@pytest.fixture(scope="module")
def results():
    return gloo(8, train)


def key_draws(state, count):
    """The state of a CPU generator that was in ``state``, after ``count`` draws of 64 bits."""
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return generator.get_state()


def test_no_false_alarm(results):
    runs = [run for run, _ in results]
    assert all(run["finite"] for run in runs)
    for run in runs:
        # Each dropout drew on a DTensor, once: a sharded draw takes one 64-bit key, and recomputing it in the backward pass
        # takes nothing.
        assert torch.equal(run["end"], key_draws(run["start"], STEPS * DRAWS_PER_STEP))
        assert run["own"] is None
    for ranks in STAGES:
        assert all(torch.equal(runs[rank]["end"], runs[ranks[0]]["end"]) for rank in ranks)
    assert not torch.equal(runs[0]["end"], runs[4]["end"])


def test_a_check_across_stages_that_are_seeded_apart(results):
    found = [run["world"] for run, _ in results]
    assert all(found) and all(one == found[0] for one in found)
    text, states = found[0]
    assert sorted(states) == list(range(8))
    assert [len({states[rank] for rank in ranks}) for ranks in STAGES] == [1, 1] and states[0] != states[4]
    table = [line for line in text.splitlines() if line.startswith("  state ")]
    assert [row.split()[-1] for row in table] == ["0-3", "4-7"]
    assert "They differ along pp, and agree along dp and tp." in text


@pytest.mark.parametrize("at", DRIFTERS)
def test_a_rank_that_drifts_is_found_by_its_own_stage(results, at):
    hit, other = STAGES if at in STAGES[0] else STAGES[::-1]
    drifts = [drifts[at] for _, drifts in results]
    assert [drifts[rank] for rank in other] == [(None, None)] * 4
    for rank in hit:
        (text, states), own = drifts[rank]
        assert text.startswith("Drifted before aten.bernoulli_.float on a DTensor of shape (4, 4, 8)")
        dp, tp = divmod(at - hit[0], 2)
        assert f"The odd one out: rank {at}, at dp {dp}, tp {tp}." in text
        assert f"The last draws of this rank, rank {rank}:" in text and text.count("test_sync_training.py:") == 4
        assert sorted(states) == list(hit)
        in_step = {states[one] for one in hit if one != at}
        assert len(in_step) == 1 and states[at] not in in_step
        assert own is not None and own[1] == states
