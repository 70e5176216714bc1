# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""The gradient of RMSNorm on a GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded


def norm_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, eps: float, plus: Tensor | None, total: Tensor, out: Tensor
) -> Tensor:
    """See `norm._norm_backward`. Rows of x and of out need not be adjacent in memory."""
    n, size = x.shape
    block, parts = padded(size), min(n, 264)
    d_weight = torch.empty(parts, size, dtype=torch.float32, device=x.device)
    _norm_backward[(parts,)](
        d_out, x, weight, plus, out, d_weight, total, n, size, d_out.stride(0), x.stride(0), out.stride(0), eps,
        PLUS=plus is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    torch.sum(d_weight, 0, out=total)
    return out


@triton.jit
def _norm_backward(
    d_out, x, weight, plus, d_x, d_weight, total, n, size, d_stride, stride, out_stride, eps,
    PLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    # One part starts from the gradient so far: the sum of the parts replaces it.
    before = tl.load(total + column, inside, 0.0)
    gradient = tl.where(tl.program_id(0) == 0, before, 0.0)
    # Rows to come are fetched while one is computed.
    for row in tl.range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0), num_stages=3):
        d = tl.load(d_out + row * d_stride + column, inside, 0.0).to(tl.float32)
        wide = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        normed, d_normed = wide * inverse, d * factor
        gradient += d * normed
        result = (d_normed - normed * (tl.sum(d_normed * normed, 0) / size)) * inverse
        if PLUS:
            result += tl.load(plus + row * size + column, inside, 0.0).to(tl.float32)
        tl.store(d_x + row * out_stride + column, result, inside)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * size + column, gradient, inside)
