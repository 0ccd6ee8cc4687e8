"""The random ops that the package handles, as data: one row an op overload."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class RandomOp:
    """One overload of an aten op that draws random numbers.

    Attributes:
        overload: the name below ``torch.ops.aten``.
        call: the public function that runs this overload on a plain tensor, with the same arguments, and with a
            ``generator=`` of the tensor's device, if only on the CPU.
        in_place: draws into its first argument and returns it; else it returns new tensors laid out like it.
        reads_input: what it draws depends on the values of its first argument, so a ``Partial`` one is reduced first.
    """

    overload: str
    call: Callable[..., Any]
    in_place: bool = False
    reads_input: bool = False

    @property
    def op(self) -> OpOverload:
        packet, _, overload = self.overload.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)


def _native_dropout(
    input: torch.Tensor, p: float, train: bool | None, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.native_dropout``, which takes no generator. With one it is what its CPU kernel does
    (``native_dropout_cpu`` in ATen/native/Dropout.cpp): a state lent to the default slot, other threads would see.
    """
    if generator is None or train is False:
        return torch.native_dropout(input, p, train)
    keep = 1.0 - p
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(keep, generator=generator)
    return (input * mask).mul_(0.0 if keep == 0.0 else 1.0 / keep), mask


TABLE = (
    RandomOp("uniform_.default", torch.Tensor.uniform_, in_place=True),
    RandomOp("normal_.default", torch.Tensor.normal_, in_place=True),
    RandomOp("log_normal_.default", torch.Tensor.log_normal_, in_place=True),
    RandomOp("exponential_.default", torch.Tensor.exponential_, in_place=True),
    RandomOp("cauchy_.default", torch.Tensor.cauchy_, in_place=True),
    RandomOp("geometric_.default", torch.Tensor.geometric_, in_place=True),
    RandomOp("bernoulli_.float", torch.Tensor.bernoulli_, in_place=True),
    RandomOp("random_.default", torch.Tensor.random_, in_place=True),
    RandomOp("random_.to", torch.Tensor.random_, in_place=True),
    RandomOp("random_.from", torch.Tensor.random_, in_place=True),
    RandomOp("rand_like.default", torch.rand_like),
    RandomOp("rand_like.generator", torch.rand_like),
    RandomOp("randn_like.default", torch.randn_like),
    RandomOp("randn_like.generator", torch.randn_like),
    RandomOp("randint_like.default", torch.randint_like),
    RandomOp("randint_like.generator", torch.randint_like),
    RandomOp("randint_like.low_dtype", torch.randint_like),
    RandomOp("randint_like.low_generator_dtype", torch.randint_like),
    RandomOp("bernoulli.default", torch.bernoulli, reads_input=True),
    RandomOp("bernoulli.p", torch.bernoulli),
    RandomOp("native_dropout.default", _native_dropout, reads_input=True),
)
