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
        call: the public function that runs this overload on a plain tensor, with the same arguments.
        in_place: draws into its first argument and returns it; else it returns new tensors laid out like it.
        reads_input: what it draws depends on the values of its first argument, so a ``Partial`` one is reduced first.
        takes_generator: ``call`` has a ``generator=``.
    """

    overload: str
    call: Callable[..., Any]
    in_place: bool = False
    reads_input: bool = False
    takes_generator: bool = True

    @property
    def op(self) -> OpOverload:
        packet, _, overload = self.overload.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)


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
    RandomOp("native_dropout.default", torch.native_dropout, reads_input=True, takes_generator=False),
)
