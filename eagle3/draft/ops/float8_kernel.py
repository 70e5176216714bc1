# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Rounding to float8 on a GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `float8.quantise`. Rows of x need not be adjacent in memory."""
    n, size = x.shape
    values = torch.empty(n, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(n, 1, dtype=torch.float32, device=x.device)
    block = padded(size)
    _quantise[(n,)](x, values, scales, size, x.stride(0), BLOCK=block, num_warps=min(max(block // 1024, 1), 32))
    return values, scales


@triton.jit
def _quantise(x, values, scales, size, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * stride + column, column < size, 0.0).to(tl.float32)
    # Compared as integers, since the maximum of floats passes over NaN.
    largest = tl.max(tl.abs(wide).to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    power = ((largest * (8 / 7)).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.maximum(power / 256, 2.0**-126)
    tl.store(values + row * size + column, (wide * (1 / scale)).to(values.dtype.element_ty), column < size)
    tl.store(scales + row, scale)
