"""Policy single_device: a whole model, sharded by FSDP2 and tensor parallelism, is the plain model."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_processes import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import each_rank, gloo

import torch_dtensor_rng as tdr
from torch_dtensor_rng import __main__ as demo

CPU = torch.device("cpu")
FSDP_TP = (_StridedShard(0, split_factor=2), Shard(0))
ROWWISE = (Shard(0), Shard(1))

# name -> (shape, placements on dp and tp, init)
BUFFERS = {
    "noise": ((9, 5), (Shard(0), Replicate()), lambda x: nn.init.normal_(x, 1.0, 0.5)),
    "signs": ((7, 6), (Replicate(), Shard(1)), lambda x: x.bernoulli_(0.5)),
    "order": ((11,), FSDP_TP, lambda x: x.random_(100)),
}
WEIGHTS = {
    "tall": ((24, 10), FSDP_TP, nn.init.kaiming_uniform_),
    "orthogonal": ((12, 7), FSDP_TP, lambda w: nn.init.orthogonal_(w, 2.0)),
    "orthogonal_wide": ((7, 12), ROWWISE, lambda w: nn.init.orthogonal_(w)),
    "orthogonal_convolution": ((6, 3, 2, 2), (Shard(0), Shard(1)), lambda w: nn.init.orthogonal_(w)),
    "orthogonal_tall_convolution": ((9, 2, 2), FSDP_TP, lambda w: nn.init.orthogonal_(w)),
    "truncated_far": ((24, 10), ROWWISE, lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.5, 2.5)),
}


def checksums(tensors):
    wholes = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    return {name: digest(whole) for name, whole in wholes.items()} | {"generator": digest(torch.get_rng_state())}


def initialised(model, more):
    """Checksums after each of several ways to initialise a model without values, and the tensors ``more``."""
    torch.manual_seed(3)
    demo.init_weights(model)
    found = [checksums(dict(model.named_parameters()))]
    for name, (_, _, init) in (BUFFERS | WEIGHTS).items():
        init(more[name])
    found.append(checksums(more))
    for module in model.modules():  # as people do it after to_empty()
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.uniform_(model.shift)
    found.append(checksums(dict(model.named_parameters())))
    generator = torch.Generator().manual_seed(4)
    demo.init_weights(model, generator)
    found.append(checksums(dict(model.named_parameters())) | {"passed": digest(generator.get_state())})
    return found


def initialised_in_a_process(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    more = {
        name: empty(*shape, device_mesh=mesh, placements=placements)
        for name, (shape, placements, _) in (BUFFERS | WEIGHTS).items()
    }
    with tdr.install("single_device", strict=True):
        return initialised(demo.build(mesh, CPU), more)


def test_four_processes_hold_the_plain_model():
    plain = initialised(demo.Transformer(), {name: torch.empty(of[0]) for name, of in (BUFFERS | WEIGHTS).items()})
    for found in gloo(4, initialised_in_a_process):
        for ours, theirs in zip(found, plain, strict=True):
            assert {name for name in theirs if ours[name] != theirs[name]} == set()


# ---------------------------------------------------------------------------------------------------------------------
# orthogonal_
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7), (3, 4, 2), (8, 2, 3)])
@pytest.mark.parametrize("placements", [(Replicate(), Replicate()), FSDP_TP, ROWWISE, (Shard(1), Replicate())])
def test_orthogonal(shape, placements):
    torch.manual_seed(5)
    plain, end = nn.init.orthogonal_(torch.empty(shape), 1.5), torch.get_rng_state()

    def on_rank(rank, mesh):
        x = nn.Parameter(empty(*shape, device_mesh=mesh, placements=placements))
        expected = distribute_tensor(plain, mesh, placements, src_data_rank=None).to_local()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        generator = torch.Generator().manual_seed(5)
        assert nn.init.orthogonal_(x, 1.5, generator) is x
        assert torch.equal(x.to_local(), expected)
        assert torch.equal(generator.get_state(), end) and torch.equal(torch.get_rng_state(), before)
        with torch.no_grad():
            x.zero_()
        nn.init.orthogonal_(x, gain=1.5)
        assert torch.equal(x.to_local(), expected)
        assert torch.equal(torch.get_rng_state(), end)
        assert x.requires_grad and x.grad_fn is None

    with tdr.install("single_device"):
        each_rank((2, 2), on_rank)


def test_orthogonal_of_what_it_does_not_take():
    def on_rank(rank, mesh):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="Only tensors with 2 or more dimensions"):
            nn.init.orthogonal_(empty(4, device_mesh=mesh, placements=[Shard(0)]))
        partial = DTensor.from_local(torch.ones(3, 4), mesh, [Partial()], run_check=False)
        with pytest.raises(RuntimeError, match="cannot draw in place into a DTensor with a Partial placement"):
            nn.init.orthogonal_(partial)
        nothing = empty(0, 4, device_mesh=mesh, placements=[Shard(0)])
        assert nn.init.orthogonal_(nothing) is nothing
        assert torch.equal(state, torch.get_rng_state())

    with tdr.install("single_device"):
        each_rank((2,), on_rank)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings: what is random of them is that of one device; the row of padding_idx is torch's.
# ---------------------------------------------------------------------------------------------------------------------


def test_an_embedding_with_a_padding_row():
    torch.manual_seed(7)
    plain, end = nn.Embedding(9, 6, padding_idx=4).weight.detach(), torch.get_rng_state()

    def on_rank(rank, mesh):
        for placements in (FSDP_TP, ROWWISE, (Shard(1), Replicate())):
            embedding = nn.Embedding(9, 6, padding_idx=4, device="meta")
            embedding.weight = nn.Parameter(distribute_tensor(embedding.weight, mesh, placements, src_data_rank=None))
            embedding.to_empty(device="cpu")
            torch.manual_seed(7)
            nn.init.normal_(embedding.weight)
            # reset_parameters() would write its zeros to a copy of a row that is spread over ranks.
            is_padding = torch.arange(9).eq(4).view(9, 1).expand(9, 6)
            is_padding = distribute_tensor(is_padding, mesh, placements, src_data_rank=None)
            with torch.no_grad():
                embedding.weight.copy_(torch.where(is_padding, 0.0, embedding.weight))
            expected = distribute_tensor(plain, mesh, placements, src_data_rank=None)
            assert torch.equal(embedding.weight.to_local(), expected.to_local())
            assert torch.equal(torch.get_rng_state(), end)

    with tdr.install("single_device"):
        each_rank((2, 2), on_rank)


# ---------------------------------------------------------------------------------------------------------------------
# Training with dropout.
# ---------------------------------------------------------------------------------------------------------------------

STEPS = 20


class DropoutOfTheBatch(nn.Dropout):
    """Drops elements of an activation of the whole batch, of which this rank has the part that ``mesh`` says."""

    def __init__(self, p, mesh):
        super().__init__(p)
        self.mesh = mesh

    def forward(self, x):
        local = x.to_local()
        whole = DTensor.from_local(local, self.mesh, [Shard(0), Shard(2)], run_check=False)
        return DTensor.from_local(super().forward(whole).to_local(), x.device_mesh, x.placements, run_check=False)


def batch_of(step):
    """The same on every rank, and beside the generators."""
    return (torch.arange(demo.BATCH * demo.LENGTH).view(demo.BATCH, -1) * (step + 3)) % demo.VOCABULARY


def losses(model, parts=1, part=0, logits_of=lambda x: x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        tokens = batch_of(step).chunk(parts)[part]
        logits = logits_of(model(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), (tokens + 1).flatten() % demo.VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def trained(rank, mesh_shape):
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    with tdr.install("single_device", strict=True):
        model = demo.build(mesh, CPU)
        for block in model.blocks:
            block.dropout = DropoutOfTheBatch(block.dropout.p, mesh)
        torch.manual_seed(5)
        demo.init_weights(model)

        def logits_of(local):
            shape = (demo.BATCH // mesh.size(0), demo.LENGTH, demo.VOCABULARY)
            stride = (demo.LENGTH * demo.VOCABULARY, demo.VOCABULARY, 1)
            logits = DTensor.from_local(local, mesh["tp"], [Shard(2)], run_check=False, shape=shape, stride=stride)
            return logits.full_tensor()

        found = losses(model, mesh.size(0), mesh.get_local_rank("dp"), logits_of)
        dist.all_reduce(found, group=mesh.get_group("dp"))
    return (found / mesh.size(0)).tolist(), digest(torch.get_rng_state())


def test_training_with_dropout():
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        model = demo.Transformer()
        torch.manual_seed(5)
        demo.init_weights(model)
        plain, end = losses(model).tolist(), digest(torch.get_rng_state())
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain[-1] < plain[0] and len(set(plain)) == STEPS
    for mesh_shape in ((1, 1), (2, 1), (1, 2), (2, 2)):
        for ours, our_end in gloo(math.prod(mesh_shape), trained, mesh_shape):
            assert ours == pytest.approx(plain, rel=0, abs=1e-12), mesh_shape
            assert our_end == end
