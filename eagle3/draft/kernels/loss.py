# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Cross entropy over the draft vocabulary, with its gradient."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded


def cross_entropy(
    logits: Tensor, offsets: Tensor, students: int, weights: Tensor, target: Tensor, mass: Tensor, negentropy: Tensor
) -> tuple[Tensor, Tensor]:
    """`objective._taught` of kl and ce; writes the gradient over the logits.

    Args:
        logits: [m, Vd].
        offsets: [B+1] int64; teacher b's rows are offsets[b] - offsets[0] .. offsets[b+1] - offsets[0] - 1.
        students: the most rows that a teacher has.
        weights: [m].
        target: [B, Vd] float32.
        mass: [B] its sum.
        negentropy: [B] sum of target log target.

    Returns:
        loss and choice [m].
    """
    value, choice = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.int64)
    _cross_entropy[(len(target),)](
        logits, offsets, weights, target, mass, negentropy, value, choice, target.shape[1],
        STUDENTS=padded(students), BLOCK=256, num_warps=8,
    )  # fmt: skip
    return value, choice


@triton.jit
def _cross_entropy(
    logits, offsets, weights, target, mass, negentropy, value, choice, size,
    STUDENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All students of a teacher together: its distribution is read once for all of them.
    teacher = tl.program_id(0).to(tl.int64)
    student, column = tl.arange(0, STUDENTS), tl.arange(0, BLOCK)
    first, start = tl.load(offsets), tl.load(offsets + teacher)
    row = start - first + student
    present = row < tl.load(offsets + teacher + 1) - first
    at, target_at = row[:, None] * size + column, teacher * size + column
    largest = tl.full([STUDENTS], float("-inf"), tl.float32)
    best, total, product = tl.zeros([STUDENTS], tl.int32), tl.zeros_like(largest), tl.zeros_like(largest)
    for block in range(0, size, BLOCK):
        inside = column < size - block
        mask = present[:, None] & inside
        # Zero for rows that only pad, so that no number there is undefined.
        z = tl.load(logits + at + block, mask, 0.0).to(tl.float32)
        wanted = tl.load(target + target_at + block, inside, 0.0)
        product += tl.sum(z * wanted[None, :], 1)
        z = tl.where(inside[None, :], z, float("-inf"))
        top, place = tl.max(z, 1, return_indices=True)
        best = tl.where(top > largest, place + block, best)
        top = tl.maximum(top, largest)
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(z - top[:, None]), 1)
        largest = top
    lse = largest + tl.log(total)
    whole, weight = tl.load(mass + teacher), tl.load(weights + row, present, 0.0)
    tl.store(value + row, tl.load(negentropy + teacher) - product + whole * lse, present)
    tl.store(choice + row, best, present)
    for block in range(0, size, BLOCK):
        inside = column < size - block
        mask = present[:, None] & inside
        z = tl.load(logits + at + block, mask, 0.0).to(tl.float32)
        wanted = tl.load(target + target_at + block, inside, 0.0)
        gradient = (tl.exp(z - lse[:, None]) * whole - wanted[None, :]) * weight[:, None]
        tl.store(logits + at + block, gradient, mask)
