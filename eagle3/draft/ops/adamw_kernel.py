# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""AdamW on a GPU: everything is read and written once."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from eagle3.draft.ops.adamw import BETAS, EPS


def adamw(
    values: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    scale: Tensor,
    skipped: Tensor,
    corrections: Tensor,
    rate: float,
    decay: float,
) -> None:
    """See `adamw.adamw`."""
    n = len(values)
    _adamw[(triton.cdiv(n, 1024),)](
        values, first, second, gradient, scale, skipped, corrections, n, rate, 1 - rate * decay,
        BETA1=BETAS[0], BETA2=BETAS[1], EPS=EPS, BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _adamw(
    values, firsts, seconds, gradients, scale, skipped, corrections, n, rate, kept,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gradient = tl.load(gradients + at, inside, 0.0) / tl.load(scale)
    first = BETA1 * tl.load(firsts + at, inside, 0.0) + (1 - BETA1) * gradient
    second = BETA2 * tl.load(seconds + at, inside, 0.0) + (1 - BETA2) * gradient * gradient
    root = tl.sqrt(second / tl.load(corrections + 1)) + EPS
    value = tl.load(values + at, inside, 0.0) * kept - rate / tl.load(corrections) * first / root
    if tl.load(skipped) == 0:
        tl.store(values + at, value, inside)
        tl.store(firsts + at, first, inside)
        tl.store(seconds + at, second, inside)
    tl.store(gradients + at, tl.zeros([BLOCK], tl.float32), inside)
