"""How a Philox generator is moved around a local op, without a device: a stand-in generator that records."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_dtensor_rng import _draw, _random
from torch_dtensor_rng._ops import RandomOp

PLAN = _random._ShardPlan(index=3, num_shards=4, start=72, end=96)


class Philox:
    """The part of a CUDA ``torch.Generator`` that is used. Two of them can share a state, as by graphsafe_set_state."""

    device = torch.device("cuda:0")

    def __init__(self, offset: int):
        self.shared = [offset]

    def get_offset(self) -> int:
        return self.shared[0]

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.shared[0] = offset

    def graphsafe_get_state(self) -> "Philox":
        handle = Philox(0)
        handle.shared = self.shared
        return handle

    def graphsafe_set_state(self, other: "Philox") -> None:
        self.shared = other.shared


def consume(default: Philox, seen: list[int], error: BaseException | None = None) -> None:
    seen.append(default.get_offset())
    default.set_offset(default.get_offset() + 4)
    if error is not None:
        raise error


def test_a_region_on_the_default_generator():
    default, seen = Philox(400), []
    with _random._philox_region(PLAN, default, default):
        consume(default, seen)
    assert (seen, default.get_offset()) == ([472], 496)


def test_a_region_lends_a_passed_generator_to_the_default_slot():
    default, generator, seen = Philox(400), Philox(1000), []
    with _random._philox_region(PLAN, generator, default):
        consume(default, seen)
    assert (seen, generator.get_offset(), default.get_offset()) == ([1072], 1096, 400)


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_region_puts_everything_back_when_the_op_raises(error, passed):
    default, seen = Philox(400), []
    generator = Philox(1000) if passed else default
    before = generator.get_offset()
    with pytest.raises(error), _random._philox_region(PLAN, generator, default):
        consume(default, seen, error())
    assert seen == [before + 72]
    assert (generator.get_offset(), default.get_offset()) == (before, 400)


def draw(error: BaseException | None = None, **kwargs: Any) -> tuple[list[int], Philox]:
    """``draw`` on a local tensor of a device that is neither CPU nor CUDA."""
    default, seen = Philox(400), []

    def call(local, *args, **kwargs):
        consume(kwargs.get("generator", default), seen, error)
        return "out"

    local = SimpleNamespace(is_cpu=False, is_cuda=False, device=torch.device("cuda:0"))
    default_of = _random._default_generator
    _random._default_generator = lambda device: default
    try:
        assert _draw.draw(RandomOp("uniform_.default", call), PLAN, local, (), kwargs) == "out"
    finally:
        _random._default_generator = default_of
    return seen, default


def test_the_quick_path_on_the_default_generator():
    seen, default = draw()
    assert (seen, default.get_offset()) == ([472], 496)


def test_the_quick_path_on_a_passed_generator():
    generator = Philox(1000)
    seen, default = draw(generator=generator)
    assert (seen, generator.get_offset(), default.get_offset()) == ([1072], 1096, 400)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_quick_path_puts_it_back_when_the_op_raises(error):
    generator = Philox(1000)
    with pytest.raises(error):
        draw(error(), generator=generator)
    assert generator.get_offset() == 1000


def test_a_device_without_live_generators_is_refused():
    with pytest.raises(RuntimeError, match=r"torch\.mps has no default_generators"):
        _random._default_generator(torch.device("mps"))


def test_a_cpu_generator_is_refused_before_anything_moves():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        draw(generator=generator)
    assert torch.equal(generator.get_state(), before)
