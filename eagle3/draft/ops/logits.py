"""Logits over a vocabulary, which are never all in memory at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Bytes of the logits computed at a time. On a CPU, small enough for the cache and for the allocator to reuse memory.
CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 1 << 30}


def chunk_rows(device: torch.device, width: int) -> int:
    """Return how many rows of `width` float32 logits fit the budget; at least 1."""
    return max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // (4 * width))


def project(states: Tensor, norm: Tensor, lm_head: Tensor, eps: float) -> Tensor:
    """Last-layer states [B, H] -> the target's logits [B, rows of lm_head], float32."""
    normed = functional.rms_norm(states.to(norm.dtype), norm.shape, norm, eps)
    if normed.is_cuda and normed.dtype != torch.float32:
        return torch.mm(normed, lm_head.mT, out_dtype=torch.float32)
    return functional.linear(normed, lm_head)
