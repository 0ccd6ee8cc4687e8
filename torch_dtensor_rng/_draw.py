"""A random op on a plain local tensor, run at its shard's place on a live generator."""

from typing import Any

import torch

from . import _random
from ._capture import capturing
from ._ops import Placed, RandomOp


def draw(
    row: RandomOp, plan: _random._ShardPlan, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs ``row`` on ``local`` at the place of ``plan``, and leaves the generator where every rank ends.

    The generator is the ``generator=`` of ``kwargs``, or the default one of the local tensor's device. If the op
    raises, it is where it was before the call. Does not communicate.

    Raises:
        RuntimeError: the generator is of another device type than ``local``, or a CUDA graph is captured.
    """
    generator = kwargs.get("generator")
    if local.is_cpu:
        if generator is None:
            generator = torch.default_generator
        elif generator.device.type != "cpu":
            _random._check_generator(generator, local.device)
        return _draw_mt19937(row, plan, local, args, kwargs, generator)
    if generator is None:
        if local.is_cuda:
            generator = torch.cuda.default_generators[local.get_device()]
        else:
            generator = _random._default_generator(local.device)
    try:
        base = generator.get_offset()
    except RuntimeError:  # a CPU generator has none; to ask for its device each time would cost more
        _random._check_generator(generator, local.device)
        if local.is_cuda and capturing(local.device):
            raise RuntimeError(
                f"{row.op}: cannot be captured in a CUDA graph on a DTensor, as its shard's place is reached by moving the "
                "generator from Python. Use torch_dtensor_rng.install(policy='single_device'), under which the ops that "
                "are drawn as on one device can be captured."
            ) from None
        raise
    try:
        generator.set_offset(base + plan.start)
        out = row.call(local, *args, **kwargs)
        generator.set_offset(base + plan.end)
    except BaseException:
        generator.set_offset(base)
        raise
    return out


def draw_as_all(
    row: RandomOp, layout: _random._ShardLayout, mesh_coordinate: Any, local: torch.Tensor, args: Any, kwargs: Any
) -> Any:
    """:func:`draw` at the place of the shard at ``mesh_coordinate``, and where that is empty, on one element beside the
    stream first: what the op refuses on the ranks that hold elements, it then refuses here too."""
    if not local.numel() and layout.end and row.placed is not Placed.TORCH_RULE:
        try_on_one_element(row, local, args, kwargs)
    return draw(row, layout.plan(mesh_coordinate), local, args, kwargs)


def try_on_one_element(row: RandomOp, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs ``row`` for an empty ``local`` on one element, beside the stream: raises what the op does not take."""
    sizes = [1] * local.ndim
    if row.placed is Placed.ROWS:
        sizes[-1] = local.shape[-1]
    first, *others = (
        torch.ones(sizes, dtype=one.dtype, device=local.device) if isinstance(one, torch.Tensor) else one
        for one in (local, *args)
    )
    row.call(first, *others, **{**kwargs, "generator": torch.Generator(local.device)})


def default_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """``generator``, or the default one of ``device``.

    Raises:
        RuntimeError: ``generator`` is of another device type.
    """
    if generator is None:
        return _random._default_generator(device)
    _random._check_generator(generator, device)
    if device.index is not None and generator.device.index not in (None, device.index):
        raise RuntimeError(f"Expected a '{device}' generator device but found '{generator.device}'")
    return generator


def _draw_mt19937(
    row: RandomOp,
    plan: _random._ShardPlan,
    local: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generator: torch.Generator,
) -> Any:
    before = generator.get_state()
    try:
        if plan.num_shards > 1:
            mt19937 = _random._get_mt19937()
            mt19937.generator.set_state(mt19937.draw_state(generator, plan.index))
            kwargs = {**kwargs, "generator": mt19937.generator}
        return row.call(local, *args, **kwargs)
    except BaseException:
        generator.set_state(before)
        raise
