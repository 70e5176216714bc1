"""Fused causal attention on a GPU: FlashAttention-4 where it is installed (Hopper, Blackwell), else torch's own."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Segments:
    """Where each sample of a row starts and ends among its queries and keys.

    Sample i has queries q[i] .. q[i+1]-1 and keys k[i] .. k[i+1]-1; its last query sees its last key (the causal
    mask is aligned at the end).
    """

    q: list[int]
    k: list[int]
    q_offsets: Tensor
    """the same as int32 on the device [samples+1]"""
    k_offsets: Tensor

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest samples."""
        q, k = (max(b - a for a, b in itertools.pairwise(edges)) for edges in (self.q, self.k))
        return q, k


def flash_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [N, Hq, dv] and log-sum-exp [N, Hq]; that of each head is contiguous in memory."""
    if kernels := _flash_attention_4(q, v):
        out, lse, *_ = kernels._flash_attn_fwd(q, k, v, return_lse=True, **_arguments(segments, scale))
    else:
        lengths = segments.q_offsets, segments.k_offsets, *segments.longest
        forward = torch.ops.aten._flash_attention_forward
        out, lse, *_ = forward(q, k, _pad(v, q), *lengths, 0.0, True, False, scale=scale)
    return out[..., : v.shape[2]], lse.mT


def flash_backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the softmax that `out` and `lse` belong to."""
    lse = lse.mT.contiguous()
    if kernels := _flash_attention_4(q, v):
        dq, dk, dv, *_ = kernels._flash_attn_bwd(q, k, v, out, d_out, lse, **_arguments(segments, scale))
    else:
        lengths = segments.q_offsets, segments.k_offsets, *segments.longest
        # Without dropout the kernel ignores its random state.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        padded_d, padded_v, padded_out = (_pad(x, q) for x in (d_out, v, out))
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            padded_d, q, k, padded_v, padded_out, lse, *lengths, 0.0, True, unused, unused, scale=scale
        )
    return dq, dk, dv[..., : v.shape[2]]


def _flash_attention_4(q: Tensor, v: Tensor) -> Any:
    """The module with the kernels, or None if they do not run here. Compiles them at first use, for any lengths."""
    major, _ = torch.cuda.get_device_capability(q.device)
    return _installed() if takes(major, q.shape[2], v.shape[2]) else None


def takes(major: int, d: int, dv: int) -> bool:
    """Whether FlashAttention-4 has kernels for a GPU generation and sizes of the heads, forward and backward."""
    if d % 8 or dv % 8:
        return False
    largest = max(d, dv)
    return (major == 9 and largest <= 256) or (major == 10 and (largest <= 128 or (d, dv) == (192, 128)))


@functools.cache
def _installed() -> Any:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn.cute import interface  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        # FlashAttention-2 has the same name.
        return None
    return interface


def _arguments(segments: Segments, scale: float) -> dict[str, Any]:
    queries, keys = segments.longest
    return {
        "softmax_scale": scale,
        "causal": True,
        "cu_seqlens_q": segments.q_offsets,
        "cu_seqlens_k": segments.k_offsets,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
    }


def _pad(x: Tensor, like: Tensor) -> Tensor:
    """Torch's kernels need one head size; MLA's values are narrower than its keys."""
    missing = like.shape[2] - x.shape[2]
    return pad(x, (0, missing)) if missing else x
