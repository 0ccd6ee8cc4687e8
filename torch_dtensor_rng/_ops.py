"""The random ops of aten, as data: which the package handles and how, which it refuses, and which are not its matter.

Adding an op is adding a row. A test walks the overloads of the running torch that are tagged ``nondeterministic_seeded``
and fails on any that is in none of the tables here and not made of rows in ``_composed.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


class Placed(Enum):
    """How the outputs of an op are placed. What the op draws follows from the sizes of the shards so placed."""

    LIKE_INPUT = "like its input"
    ROWS = "like its input, whose last dim is made whole first"
    TORCH_RULE = "by torch's own sharding rule"


def _is_float64(dtype: torch.dtype, *args: Any) -> bool:
    return dtype == torch.float64


# From this range on random_() takes 64 bits (``random_from_to_kernel`` in ATen/native/cuda/DistributionTemplates.h), and
# without a range where it fills 64-bit dtypes (``random_kernel``, there).
_WIDE_RANGE = 1 << 28
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 1}


def _random_is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.float64)


def _random_to_is_wide(dtype: torch.dtype, high: int) -> bool:
    return high >= _WIDE_RANGE


def _random_from_is_wide(dtype: torch.dtype, low: int, high: int | None = None) -> bool:
    if high is None:  # up to the largest number (``random_from_to`` in ATen/native/DistributionTemplates.h)
        high = 1 << _DIGITS[dtype] if dtype in _DIGITS else torch.iinfo(dtype).max + 1
    return high - low >= _WIDE_RANGE


@dataclass(frozen=True, slots=True)
class RandomOp:
    """One overload of an aten op that draws random numbers.

    Attributes:
        overload: the name below ``torch.ops.aten``.
        call: the public function that runs this overload on plain tensors, with the same arguments, and with a
            ``generator=`` of the tensor's device, if only on the CPU.
        in_place: draws into its first argument and returns it; else it returns new tensors.
        reads_input: what it draws depends on the values of its first argument, so a ``Partial`` one is reduced first.
        placed: how its outputs are placed.
        tensors: how many of its first arguments are tensors. The others are brought to the first one's placements.
        least_span: the Philox offset span that the local call can touch however few values it draws. It touches the
            larger of this and of what a stock kernel touches for as many values (``_random._philox_consumption``).
        values: how many values it draws at most for an element of its first argument.
        meta: what to run on meta tensors to learn its outputs, where torch has no such kernel, or one of other strides.
        functional: the row that takes the same arguments, writes none, and returns what this one returns and writes.
        fill: for an op that draws an element from its place in the tensor alone, and so can draw a shard as one device
            draws it: what fills a tensor in place with the same numbers, from the op's further arguments and a
            ``generator=``; for ``native_dropout`` the op. None where its parameters are tensors, or where the kernel
            lays the stream out otherwise.
        wide: whether the CUDA kernel takes 64 bits for an element, from its dtype and the op's further arguments.
    """

    overload: str
    call: Callable[..., Any]
    in_place: bool = False
    reads_input: bool = False
    placed: Placed = Placed.LIKE_INPUT
    tensors: int = 1
    values: int = 1
    least_span: int = 0
    meta: Callable[..., Any] | None = None
    functional: str | None = None
    fill: Callable[..., Any] | None = None
    wide: Callable[..., bool] = _is_float64

    @property
    def op(self) -> OpOverload:
        return overload(self.overload)


def overload(name: str) -> OpOverload:
    """The overload of that name below ``torch.ops.aten``."""
    packet, _, one = name.partition(".")
    return getattr(getattr(aten, packet), one)


def exists(name: str) -> bool:
    """Whether the running torch has the overload."""
    packet, _, one = name.partition(".")
    return one in getattr(aten, packet).overloads() if hasattr(aten, packet) else False


def _native_dropout(
    input: torch.Tensor, p: float, train: bool | None, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.native_dropout``, which takes no generator. With one it is what its CPU kernel does
    (``native_dropout_cpu`` in ATen/native/Dropout.cpp): a state lent to the default slot, other threads would see.
    """
    if generator is None or train is False:
        out, mask = torch.native_dropout(input, p, train)
        return out, mask if mask.numel() else mask.bool()  # on the CPU an empty mask has the input's dtype
    return apply_mask(
        input, torch.empty_like(input, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator), 1.0 - p
    )


def apply_mask(input: torch.Tensor, mask: torch.Tensor, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout on the CPU returns (``native_dropout_cpu``, there) for a mask of probability ``keep``."""
    return (input * mask).mul_(0.0 if keep == 0.0 else 1.0 / keep), mask


def _clone(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _two_clones(x: torch.Tensor, noise: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(noise)


def _contiguous(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# Kernels that draw until they accept reserve 10 to 42 offsets, and may read past that (ATen/native/cuda/Distributions.cu).
_REJECTION = 4096
# With replacement it advances 4 a row of probabilities (ATen/native/cuda/MultinomialKernel.cu); without, it draws one
# exponential value for each. As many values as make 4 offsets a probability cover both.
_MULTINOMIAL = 32

BERNOULLI = RandomOp("bernoulli_.float", torch.Tensor.bernoulli_, in_place=True, fill=torch.Tensor.bernoulli_)

TABLE = (
    RandomOp("uniform_.default", torch.Tensor.uniform_, in_place=True, fill=torch.Tensor.uniform_),
    RandomOp("normal_.default", torch.Tensor.normal_, in_place=True, fill=torch.Tensor.normal_),
    RandomOp("log_normal_.default", torch.Tensor.log_normal_, in_place=True, fill=torch.Tensor.log_normal_),
    RandomOp("exponential_.default", torch.Tensor.exponential_, in_place=True, fill=torch.Tensor.exponential_),
    RandomOp("cauchy_.default", torch.Tensor.cauchy_, in_place=True, fill=torch.Tensor.cauchy_),
    RandomOp("geometric_.default", torch.Tensor.geometric_, in_place=True, fill=torch.Tensor.geometric_),
    BERNOULLI,
    RandomOp("random_.default", torch.Tensor.random_, in_place=True, fill=torch.Tensor.random_, wide=_random_is_wide),
    RandomOp("random_.to", torch.Tensor.random_, in_place=True, fill=torch.Tensor.random_, wide=_random_to_is_wide),
    RandomOp("random_.from", torch.Tensor.random_, in_place=True, fill=torch.Tensor.random_, wide=_random_from_is_wide),
    RandomOp("uniform.default", aten.uniform.default, meta=_clone, fill=torch.Tensor.uniform_),
    RandomOp("normal_functional.default", aten.normal_functional.default, meta=_clone, fill=torch.Tensor.normal_),
    RandomOp("log_normal.default", aten.log_normal.default, meta=_clone, fill=torch.Tensor.log_normal_),
    RandomOp("exponential.default", aten.exponential.default, meta=_clone, fill=torch.Tensor.exponential_),
    RandomOp("cauchy.default", aten.cauchy.default, meta=_clone, fill=torch.Tensor.cauchy_),
    RandomOp("geometric.default", aten.geometric.default, meta=_clone, fill=torch.Tensor.geometric_),
    RandomOp("random.default", aten.random.default, meta=_clone, fill=torch.Tensor.random_, wide=_random_is_wide),
    RandomOp("random.to", aten.random.to, meta=_clone, fill=torch.Tensor.random_, wide=_random_to_is_wide),
    RandomOp(
        "random.from", getattr(aten.random, "from"), meta=_clone, fill=torch.Tensor.random_, wide=_random_from_is_wide
    ),
    RandomOp("rand_like.default", torch.rand_like, fill=torch.Tensor.uniform_),
    RandomOp("rand_like.generator", torch.rand_like, fill=torch.Tensor.uniform_),
    RandomOp("randn_like.default", torch.randn_like, fill=torch.Tensor.normal_),
    RandomOp("randn_like.generator", torch.randn_like, fill=torch.Tensor.normal_),
    RandomOp("randint_like.default", torch.randint_like, fill=torch.Tensor.random_, wide=_random_to_is_wide),
    RandomOp("randint_like.generator", torch.randint_like, fill=torch.Tensor.random_, wide=_random_to_is_wide),
    RandomOp("randint_like.low_dtype", torch.randint_like, fill=torch.Tensor.random_, wide=_random_from_is_wide),
    RandomOp(
        "randint_like.low_generator_dtype", torch.randint_like, fill=torch.Tensor.random_, wide=_random_from_is_wide
    ),
    RandomOp("bernoulli.p", torch.bernoulli, fill=torch.Tensor.bernoulli_),
    RandomOp("native_dropout.default", _native_dropout, reads_input=True, fill=_native_dropout),
    RandomOp("bernoulli.default", torch.bernoulli, reads_input=True),
    # It advances by 12, of which it reads 4 (ATen/native/cuda/DistributionBernoulli.cu); so does bernoulli.default, whose
    # places are torch's own.
    RandomOp("bernoulli_.Tensor", torch.Tensor.bernoulli_, in_place=True, tensors=2, least_span=12),
    RandomOp("poisson.default", torch.poisson, reads_input=True, least_span=_REJECTION, meta=_contiguous),
    RandomOp(
        "binomial.default",
        torch.binomial,
        reads_input=True,
        tensors=2,
        least_span=_REJECTION,
        meta=_contiguous,
    ),
    RandomOp(
        "_standard_gamma.default",
        torch._standard_gamma,
        reads_input=True,
        least_span=_REJECTION,
        meta=_contiguous,
    ),
    RandomOp(
        "_sample_dirichlet.default",
        torch._sample_dirichlet,
        reads_input=True,
        placed=Placed.ROWS,
        least_span=_REJECTION,
        meta=_contiguous,
    ),
    RandomOp("multinomial.default", torch.multinomial, reads_input=True, placed=Placed.ROWS, values=_MULTINOMIAL),
    RandomOp(
        "rrelu_with_noise.default",
        aten.rrelu_with_noise.default,
        reads_input=True,
        tensors=2,
        meta=_contiguous,
        functional="rrelu_with_noise_functional.default",
    ),
    RandomOp(
        "rrelu_with_noise_.default",
        aten.rrelu_with_noise_.default,
        in_place=True,
        reads_input=True,
        tensors=2,
        functional="rrelu_with_noise_functional.default",
    ),
    RandomOp(
        "rrelu_with_noise_functional.default",
        aten.rrelu_with_noise_functional.default,
        reads_input=True,
        tensors=2,
        meta=_two_clones,
    ),
    *(
        RandomOp(f"{name}.default", getattr(aten, name).default, placed=Placed.TORCH_RULE, reads_input=True)
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
    ),
)

# Torch itself makes these of other ops before a DTensor sees them; under inference_mode the package does.
DECOMPOSED = (
    "alpha_dropout.default",
    "alpha_dropout_.default",
    "dropout.default",
    "dropout_.default",
    "feature_alpha_dropout.default",
    "feature_alpha_dropout_.default",
    "feature_dropout.default",
    "feature_dropout_.default",
    "rrelu.default",
    "rrelu_.default",
    "scaled_dot_product_attention.default",
    "_scaled_dot_product_attention_math.default",
)

_OUT = "call it without out=, and copy_() what it returns into the tensor"
_FILL = (
    "fill the tensor in place with uniform_(), normal_() or random_(), or draw it anew with torch_dtensor_rng's {}()"
)
_ATTENTION = "use torch.nn.functional.scaled_dot_product_attention"

# What raises on a DTensor, and the way out that the error names.
REFUSED = {
    **dict.fromkeys(
        (
            "bernoulli.Tensor_out",
            "bernoulli.float_out",
            "bernoulli.out",
            "binomial.out",
            "cauchy.out",
            "exponential.out",
            "geometric.out",
            "log_normal.out",
            "multinomial.out",
            "native_dropout.out",
            "normal.Tensor_Tensor_out",
            "normal.Tensor_float_out",
            "normal.float_Tensor_out",
            "normal.out",
            "poisson.out",
            "rand_like.generator_out",
            "rand_like.out",
            "randint_like.Tensor_generator_out",
            "randint_like.Tensor_out",
            "randint_like.generator_out",
            "randint_like.low_dtype_out",
            "randint_like.low_generator_dtype_out",
            "randint_like.out",
            "randn_like.generator_out",
            "randn_like.out",
            "random.from_out",
            "random.out",
            "random.to_out",
            "rrelu_with_noise.out",
            "uniform.out",
            "_sample_dirichlet.out",
            "_standard_gamma.out",
        ),
        _OUT,
    ),
    **dict.fromkeys(
        ("rand.generator_out", "rand.out", "rand.generator_with_names_out", "rand.names_out"), _FILL.format("rand")
    ),
    **dict.fromkeys(
        ("randn.generator_out", "randn.out", "randn.generator_with_names_out", "randn.names_out"), _FILL.format("randn")
    ),
    **dict.fromkeys(
        ("randint.generator_out", "randint.low_generator_out", "randint.low_out", "randint.out"),
        _FILL.format("randint"),
    ),
    "normal.float_float_out": _FILL.format("normal"),
    **dict.fromkeys(("randperm.generator_out", "randperm.out"), "draw it anew with torch_dtensor_rng.randperm()"),
    **dict.fromkeys(("_fused_dropout.default", "_fused_dropout.out"), "use torch.nn.functional.dropout"),
    **dict.fromkeys(
        (
            "_flash_attention_forward.default",
            "_flash_attention_forward.quantized",
            "_flash_attention_forward_no_dropout_inplace.default",
            "_cudnn_attention_forward.default",
            "_cudnn_attention_forward_no_dropout_inplace.default",
            "_efficient_attention_forward.default",
            "_scaled_dot_product_flash_attention.quantized",
            "_scaled_dot_product_fused_attention_overrideable.default",
            "_triton_scaled_dot_attention.default",
            "_triton_scaled_dot_attention.out",
        ),
        _ATTENTION,
    ),
    "_fill_mem_eff_dropout_mask_.default": "draw a mask with bernoulli_()",
    "_scaled_dot_product_flash_attention_for_cpu.default": (
        "choose the math path: with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    ),
}

# With out= some factories decompose into this, which DTensor has no rule for.
RESIZED = "if it comes from out= of torch.rand() or torch.randn(), " + _FILL.format("rand() or randn")

# What the gradients of rows take from torch. It has no sharding rule for the first two, and for the last one, where the
# gradient is Partial, ranks may choose other collectives than their neighbours.
GRADIENTS = ("_standard_gamma_grad.default", "_dirichlet_grad.default", "rrelu_with_noise_backward.default")

_NO_TENSOR = "takes no tensor, so no DTensor: torch_dtensor_rng has factories of DTensors"
_REPLAYS = "draws nothing: it reads the seed and offset that the forward pass has kept"
_RNN = "a recurrent cell's dropout: DTensor has no sharding rule for the cell"

# What is left to torch, and why.
OUT_OF_SCOPE = {
    **dict.fromkeys(
        (
            "normal.float_float",
            "rand.default",
            "rand.generator",
            "rand.generator_with_names",
            "rand.names",
            "randint.default",
            "randint.generator",
            "randint.low",
            "randint.low_generator",
            "randn.default",
            "randn.generator",
            "randn.generator_with_names",
            "randn.names",
            "randperm.default",
            "randperm.generator",
        ),
        _NO_TENSOR,
    ),
    **dict.fromkeys(
        (
            "_cudnn_attention_backward.default",
            "_scaled_dot_product_cudnn_attention_backward.default",
            "_scaled_dot_product_efficient_attention_backward.default",
        ),
        _REPLAYS,
    ),
    "_fused_sdp_choice.default": "draws nothing: it says which attention kernel fits",
    **dict.fromkeys(
        (
            "_cudnn_rnn.default",
            "_cudnn_rnn.out",
            "gru.data",
            "gru.input",
            "lstm.data",
            "lstm.input",
            "miopen_rnn.default",
            "miopen_rnn.out",
            "rnn_relu.data",
            "rnn_relu.input",
            "rnn_tanh.data",
            "rnn_tanh.input",
        ),
        _RNN,
    ),
    **dict.fromkeys(("_cudnn_init_dropout_state.default", "_cudnn_init_dropout_state.out"), "makes a cuDNN state"),
    **dict.fromkeys(
        ("_lstm_mps.default", "_lstm_mps.out", "_scaled_dot_product_attention_math_for_mps.default"),
        "MPS has no DTensor",
    ),
    "_nested_tensor_softmax_with_shape.default": "nested tensors are no DTensors",
}
