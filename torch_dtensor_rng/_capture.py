"""Draws that are captured in a CUDA graph, where no generator can be read or moved from Python."""

import torch

from . import _random


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is captured."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def reserve(generator: torch.Generator, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances ``generator`` by ``end``, a multiple of 4, in the graph that is being captured, and returns its seed and
    its offset before: scalar int64 tensors on its device, which hold the replay's own at each replay.

    They are what the memory-efficient attention keeps for its backward; with dropout it reserves one value a score
    (``_efficient_attention_forward`` in ATen/native/transformers/cuda/attention.cu).

    Raises:
        RuntimeError: ``generator`` is not the default one, and the graph does not know it
            (``CUDAGraph.register_generator_state``).
    """
    query = torch.empty(1, end // 4, 1, 8, dtype=torch.float16, device=generator.device)
    key = torch.empty(1, 4, 1, 8, dtype=torch.float16, device=generator.device)
    with _random._lend(generator, _random._default_generator(generator.device)):
        _, _, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            query, key, key, None, None, None, None, None, 0.5, 0, False
        )
    return seed, offset
