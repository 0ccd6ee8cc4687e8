"""Numbers that do not change between releases: where shards draw, and what CPU shards draw."""

import expecttest
import torch
from torch.distributed.tensor import Replicate, Shard, empty
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import coordinates, each_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _random


class TestGolden(expecttest.TestCase):
    def test_integers_of_cpu_shards(self):
        def on_rank(rank, mesh):
            torch.manual_seed(2026)
            x = empty(8, 2, dtype=torch.int64, device_mesh=mesh, placements=[Shard(0)])
            return [x.random_(0, 10**6).to_local().flatten().tolist() for _ in range(2)]

        with tdr.install():
            drawn = each_rank((4,), on_rank)
        self.assertExpectedInline(
            "\n".join(map(str, drawn)),
            """\
[[133736, 452358, 53751, 370855], [132979, 982201, 194474, 563807]]
[[777157, 388208, 470208, 940146], [232697, 101248, 60764, 980480]]
[[227092, 623805, 363731, 376241], [628683, 526943, 536970, 664610]]
[[490037, 201236, 324884, 566847], [499083, 808714, 372253, 563628]]""",
        )

    def test_fractions_of_cpu_shards(self):
        def on_rank(rank, mesh):
            torch.manual_seed(2026)
            x = empty(8, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0), Replicate()])
            return x.uniform_().to_local().tolist()

        with tdr.install():
            drawn = each_rank((2, 2), on_rank)
        self.assertExpectedInline(
            "\n".join(map(str, drawn)),
            """\
[0.043964455203444386, 0.5435751473550042, 0.8030763168275383, 0.7820750471292308]
[0.043964455203444386, 0.5435751473550042, 0.8030763168275383, 0.7820750471292308]
[0.4649988682248658, 0.7458499322212104, 0.6992242161071734, 0.912356096683219]
[0.4649988682248658, 0.7458499322212104, 0.6992242161071734, 0.912356096683219]""",
        )

    def test_a_mixed_state_after_the_words_that_are_set(self):
        mt19937 = _random._get_mt19937()
        generator = torch.Generator()
        generator.set_state(mt19937.mixed_state(0x0123456789ABCDEF, 3))
        drawn = torch.empty(1000, dtype=torch.int32).random_(generator=generator)
        self.assertExpectedInline(
            str([*drawn[:4].tolist(), *drawn[620:626].tolist()]),
            """[702620664, 1046886131, 2108647462, 1849069385, 602011309, 851484012, 2098395845, 190099866, 449690933, 424768951]""",
        )

    def test_places(self):
        cases = [
            ((16, 6), (4,), (Shard(0),)),
            ((10, 6), (2, 2), (Shard(1), Replicate())),
            ((9, 25), (2, 3), (Shard(0), Shard(1))),
            ((32, 4), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
            ((5,), (4,), (Shard(0),)),
        ]
        lines = []
        for shape, mesh_shape, placements in cases:
            layout = _random._calc_layout(shape, placements, mesh_shape)
            starts = [layout.plan(at).start for at in coordinates(mesh_shape)]
            lines.append(f"{shape} on {mesh_shape}: starts {starts}, end {layout.end}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
(16, 6) on (4,): starts [0, 24, 48, 72], end 96
(10, 6) on (2, 2): starts [0, 0, 32, 32], end 60
(9, 25) on (2, 3): starts [0, 48, 92, 136, 180, 228], end 244
(32, 4) on (2, 2): starts [0, 32, 64, 96], end 128
(5,) on (4,): starts [0, 4, 8, 12], end 12""",
        )
