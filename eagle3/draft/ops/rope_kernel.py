# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Rotation on a GPU."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, direction: float, interleaved: bool) -> Tensor:
    """See `rope._rotate`. Rows and heads of x need not be adjacent in memory."""
    n, heads, d = x.shape
    _rotate[(n,)](
        x, positions, cos, sin, direction, heads, x.stride(0), x.stride(1),
        HALF=d // 2, INTERLEAVED=interleaved, HEADS=padded(heads), BLOCK=padded(d // 2), num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def _rotate(
    x, positions, cosines, sines, direction, heads, row_stride, head_stride,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (pair < HALF)
    angle = tl.load(positions + row) * HALF + pair
    cos, sin = tl.load(cosines + angle, pair < HALF, 0.0), direction * tl.load(sines + angle, pair < HALF, 0.0)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = first_at + (1 if INTERLEAVED else HALF)
    at = x + row * row_stride + head * head_stride
    first = tl.load(at + first_at, inside, 0.0).to(tl.float32)
    second = tl.load(at + second_at, inside, 0.0).to(tl.float32)
    tl.store(at + first_at, first * cos - second * sin, inside)
    tl.store(at + second_at, second * cos + first * sin, inside)
