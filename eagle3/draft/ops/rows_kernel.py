# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Sums over rows on a GPU."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


def add_rows(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """See `rows.add_rows`. Rows of both need not be adjacent in memory."""
    n, size = x.shape
    blocks = triton.cdiv(size, 2048)
    _add_rows[n, blocks](total, rows, x, size, total.stride(0), x.stride(0), BLOCK=2048, num_warps=4)


@triton.jit
def _add_rows(total, rows, x, size, total_stride, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    goal = total + tl.load(rows + row) * total_stride + column
    more = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    tl.store(goal, tl.load(goal, inside, 0.0).to(tl.float32) + more, inside)


def sum_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """See `rows.sum_rows`."""
    size = x.shape[1]
    out = x.new_empty(len(offsets) - 1, size)
    _sum_rows[len(out), triton.cdiv(size, 1024)](x, rows, offsets, out, size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _sum_rows(x, rows, offsets, out, size, BLOCK: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(offsets + bag), tl.load(offsets + bag + 1)):
        total += tl.load(x + tl.load(rows + index) * size + column, column < size, 0.0).to(tl.float32)
    tl.store(out + bag * size + column, total, column < size)
