# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Cross entropy over the draft vocabulary, with its gradient."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded

from eagle3.draft.ops.losses import LossTarget


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    offsets: Tensor,
    students: int,
    weights: Tensor,
    loss_target: LossTarget,
    one_hot: bool,
) -> tuple[Tensor, Tensor]:
    """kl, or ce (`one_hot`), as `losses.value_and_gradient`; overwrites the logits with the gradient.

    Args:
        logits: [m, Vd].
        target: the target's logits [B, Vd] float32.
        offsets: [B+1] int64; teacher b's rows are offsets[b] - offsets[0] .. offsets[b+1] - offsets[0] - 1.
        students: maximum number of rows that a teacher has.
        weights: [m].
        loss_target: of the B teachers.
        one_hot: use the target's most likely token as its distribution.

    Returns:
        loss and choice [m].
    """
    value, choice = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.int64)
    top, _, shift, mass, negentropy = loss_target
    rows = padded(students)
    _cross_entropy[(len(target),)](
        logits, target, offsets, weights, top, shift, mass, negentropy, value, choice, target.shape[1],
        ONE_HOT=one_hot, STUDENTS=rows, BLOCK=max(2048 // rows, 128), num_warps=4,
    )  # fmt: skip
    return value, choice


@triton.jit
def _cross_entropy(
    logits, target, offsets, weights, top, shift, mass, negentropy, value, choice, size,
    ONE_HOT: tl.constexpr, STUDENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All students of a teacher together: its distribution is read once for all of them.
    teacher = tl.program_id(0).to(tl.int64)
    student, column = tl.arange(0, STUDENTS), tl.arange(0, BLOCK)
    first, start = tl.load(offsets), tl.load(offsets + teacher)
    row = start - first + student
    present = row < tl.load(offsets + teacher + 1) - first
    at, target_at = logits + row[:, None] * size + column, target + teacher * size + column
    label, own_shift, whole = tl.load(top + teacher), tl.load(shift + teacher), tl.load(mass + teacher)
    # Every column of the block has a softmax of its own, so that no thread waits for another before the end. The
    # numbers of what only pads are finite and far below all others.
    largest = tl.full([STUDENTS, BLOCK], -1e30, tl.float32)
    best, total, product = tl.zeros([STUDENTS, BLOCK], tl.int32), tl.zeros_like(largest), tl.zeros_like(largest)
    for block in tl.range(0, size, BLOCK, num_stages=3):
        inside = column < size - block
        z = tl.load(at + block, present[:, None] & inside, -1e30).to(tl.float32)
        if ONE_HOT:
            wanted = (column + block == label).to(tl.float32)
        else:
            wanted = tl.exp(tl.load(target_at + block, inside, float("-inf")) - own_shift)
        product += z * wanted[None, :]
        above = z > largest
        smaller = tl.exp(-tl.abs(z - largest))
        total = tl.where(above, total * smaller + 1, total + smaller)
        best = tl.where(above, column + block, best)
        largest = tl.maximum(largest, z)
    highest = tl.max(largest, 1)
    lse = highest + tl.log(tl.sum(total * tl.exp(largest - highest[:, None]), 1))
    weight = tl.load(weights + row, present, 0.0)
    tl.store(value + row, tl.load(negentropy + teacher) - tl.sum(product, 1) + whole * lse, present)
    tl.store(choice + row, tl.min(tl.where(largest == highest[:, None], best, size), 1), present)
    for block in tl.range(0, size, BLOCK, num_stages=3):
        inside = column < size - block
        mask = present[:, None] & inside
        z = tl.load(at + block, mask, 0.0).to(tl.float32)
        if ONE_HOT:
            wanted = (column + block == label).to(tl.float32)
        else:
            wanted = tl.exp(tl.load(target_at + block, inside, float("-inf")) - own_shift)
        gradient = (tl.exp(z - lse[:, None]) * whole - wanted[None, :]) * weight[:, None]
        tl.store(at + block, gradient, mask)
