"""The blocks of docs/recipes.md run, and draw what one device draws."""

import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import each_rank, gloo

import torch_dtensor_rng as tdr

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "recipes.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def recipe(name):
    (block,) = (block for block in BLOCKS if f"\ndef {name}(" in block)
    found = {}
    exec(compile(block, str(PAGE), "exec"), found)
    return found[name]


def on_rank(rank, names, policy):
    with tdr.install(policy):
        return {name: [x.tolist() for x in recipe(name)()] for name in names}


def two_linears(draw):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        draw(layer)
    return [*model.parameters()]


def truncated(layer):
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def linear():
    model = nn.Linear(16, 32)
    torch.manual_seed(0)
    model.reset_parameters()
    return [*model.parameters()]


def stage(index):
    torch.manual_seed(index)
    return [nn.init.normal_(torch.empty(16, 8))]


def adapters():
    generator = torch.Generator().manual_seed(1)
    return [nn.init.kaiming_uniform_(torch.empty(4, 16), generator=generator), torch.zeros(32, 4)]


def routed():
    torch.manual_seed(0)
    return [F.gumbel_softmax(torch.zeros(32, 8), tau=0.5)]


# What the plain calls draw, by the rank that returns it.
PLAIN = {
    "fsdp2": lambda rank: two_linears(nn.Linear.reset_parameters),
    "tp_and_fsdp2": lambda rank: two_linears(truncated),
    "hsdp": lambda rank: linear(),
    "stages": lambda rank: stage(rank // 2),
    "torchtitan": lambda rank: stage(5 + rank // 2),
    "lora": lambda rank: adapters(),
    "router": lambda rank: routed(),
}


def test_every_block_has_a_test():
    names = [re.findall(r"^def (\w+)", block, re.MULTILINE)[-1] for block in BLOCKS]
    assert sorted(names) == sorted([*PLAIN, "train", "captured"])


@pytest.mark.parametrize("policy", ["single_device", "offset"])
def test_a_recipe(policy):
    for rank, drawn in enumerate(gloo(4, on_rank, tuple(PLAIN), policy)):
        for name, plain in PLAIN.items():
            expected = [x.detach() for x in plain(rank)]
            ours = [torch.tensor(x) for x in drawn[name]]
            assert [x.shape for x in ours] == [x.shape for x in expected]
            same = all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, expected))
            assert same == (policy == "single_device"), name


def trained(rank, shape, folder, steps):
    with tdr.install("single_device"):
        return [x.tolist() for x in recipe("train")(shape, folder, steps)]


def test_a_run_that_is_cut_and_resumed_on_fewer_ranks(tmp_path):
    whole = gloo(4, trained, (2, 2), str(tmp_path / "whole"), 4)
    gloo(4, trained, (2, 2), str(tmp_path / "cut"), 2)
    cut = gloo(2, trained, (2, 1), str(tmp_path / "cut"), 4)
    assert cut[0] == whole[0] == whole[1]
    assert cut[1] == whole[2] == whole[3]


def jittered():
    noise = torch.Generator("cuda")
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        noise.manual_seed(seed)
        for _ in range(2):
            jitter = torch.empty(30, 40, device="cuda").normal_(std=0.1, generator=noise)
            drawn.append(F.dropout(torch.ones(30, 40, device="cuda") + jitter, 0.3))
    return drawn


@pytest.mark.gpu
def test_a_captured_step():
    def on_rank(rank, mesh):
        for ours, plain in zip(recipe("captured")(), jittered()):
            assert torch.equal(ours, distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None).to_local())

    with tdr.install("single_device"):
        each_rank((3,), on_rank, "cuda")
