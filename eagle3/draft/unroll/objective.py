"""The objective: vocabulary projections, teacher, loss and gradients, chunk by chunk.

For root p and step t the student's logits are z_t[p] = lm_head h_t[p]; its teacher is the target's distribution for
x[p+2+t], l[p+t] = W N(y[p+1+t]), and p+t is a root, too. So the teacher of every root is computed once and serves all
steps. No [rows, vocabulary] tensor is ever whole: a chunk of teacher rows is projected together with all student
rows that it teaches, and gradients are computed on the spot: the loss is where backward starts.

The losses themselves are in `eagle3.draft.ops.losses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import Row
from eagle3.draft.ops.linear import Weight, linear, weight_backward
from eagle3.draft.ops.logits import chunk_rows, project
from eagle3.draft.ops.losses import LOSSES, LossTarget, loss_target, value_and_gradient
from eagle3.target.weights import HeadWeights


@dataclass(frozen=True)
class Objective:
    """Which loss, and the weight of every step: decay^t, or 1 in the sampled unroll."""

    loss: str
    true_mass: bool
    lk_scale: float
    lk_decay: float
    step_weights: tuple[float, ...]

    @classmethod
    def of(cls, settings: DraftSettings, *, sampled: bool) -> Objective:
        weights = tuple(1.0 if sampled else settings.decay**t for t in range(settings.unroll))
        return cls(settings.loss, settings.true_mass, settings.lk_scale, settings.lk_decay, weights)


class Teacher(NamedTuple):
    """The target's head on the draft vocabulary."""

    norm: Tensor
    lm_head: Tensor
    """[Vd, H]"""
    eps: float

    @classmethod
    def of(cls, head: HeadWeights, target_ids: Tensor, device: torch.device, dtype: torch.dtype) -> Teacher:
        lm_head = head.lm_head[target_ids.to(head.lm_head.device)].to(device, dtype)
        return cls(head.norm.to(device, dtype), lm_head, head.rms_norm_eps)


class LossOutput(NamedTuple):
    """The loss of a row, and that of every pair (t, root) in the order of the unroll's outputs [M]."""

    total: Tensor
    """the row's share of the loss: sum over t and roots of step_weight_t / totals_t * loss_t[p]"""
    gradient: Tensor | None
    """its gradient by the unroll's outputs [M, H]; None if weights were prepared without grad mode"""
    loss: Tensor
    """float32, unweighted"""
    drafted: Tensor
    """int64: argmax of z, an index into the draft vocabulary"""
    correct: Tensor
    """bool: whether that is the target's most likely token"""


@torch.no_grad()
def projected_loss(
    hidden: Tensor, lm_head: Weight, teacher: Teacher, row: Row, objective: Objective, totals: Sequence[int]
) -> LossOutput:
    """Return the row's loss, its gradient, and what was drafted; add up the gradient of lm_head.

    Args:
        hidden: h_t of all steps [M, H], from `unroll`.
        lm_head: [Vd, H].
        teacher: the target's head.
        row: the row that `hidden` belongs to, with its teacher stats.
        objective: loss and step weights.
        totals: for every step, the number of positions with m_t = 1 over all rows and ranks of the optimiser step.
    """
    device = hidden.device
    scales = [weight / max(total, 1) for weight, total in zip(objective.step_weights, totals, strict=True)]
    # Small enough to be sent without waiting for the device.
    weights = torch.tensor(scales, device="cpu").to(device, non_blocking=True)[row.pair_steps]
    # In the order of `pairs`, and of teachers.
    gradient = torch.empty_like(hidden) if lm_head.gradients else None
    losses, choices = [], []
    assert row.teacher_stats is not None
    whole = loss_target(*row.teacher_stats, one_hot=LOSSES[objective.loss].one_hot, true_mass=objective.true_mass)
    for taught, chunk in _chunks(row, len(lm_head.value), device):
        target_logits = project(row.teacher[taught], *teacher)
        states = hidden.index_select(0, row.pairs[chunk])
        logits = linear(states, lm_head)
        target = LossTarget(*(values[taught] for values in whole))
        loss, choice, d_logits = _student(logits, target_logits, row, taught, chunk, weights[chunk], target, objective)
        losses.append(loss)
        choices.append(choice)
        if gradient is not None:
            torch.mm(d_logits, lm_head.value, out=gradient[chunk])
            weight_backward(d_logits, states, lm_head)
    loss, drafted = torch.cat(losses), torch.cat(choices)[row.pair_places]
    return LossOutput(
        total=loss.dot(weights),
        gradient=None if gradient is None else gradient.index_select(0, row.pair_places),
        loss=loss[row.pair_places],
        drafted=drafted,
        correct=drafted == whole.top[row.ahead],
    )


def _student(
    logits: Tensor,
    target_logits: Tensor,
    row: Row,
    taught: slice,
    chunk: slice,
    weights: Tensor,
    target: LossTarget,
    objective: Objective,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, choice and weighted gradient of a chunk's logits [m, Vd], by the target's logits [B, Vd]; the gradient may
    overwrite the logits.
    """
    loss = LOSSES[objective.loss]
    if logits.is_cuda and loss.fused:
        from eagle3.draft.ops.losses_kernel import cross_entropy

        offsets = row.pair_offsets[taught.start : taught.stop + 1]
        value, choice = cross_entropy(logits, target_logits, offsets, len(row.alive), weights, target, loss.one_hot)
        return value, choice, logits
    teachers = row.ahead[row.pairs[chunk]] - taught.start
    return value_and_gradient(
        logits, target_logits, teachers, weights, target, objective.loss, objective.lk_scale, objective.lk_decay
    )


def _chunks(row: Row, Vd: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut the teacher rows so that the students' logits fit the budget.

    Yields:
        a slice of teacher rows, and the slice of `row.pairs` that they teach.
    """
    size = chunk_rows(device, Vd * len(row.alive))
    bounds = row.pair_bounds
    for first in range(0, len(bounds) - 1, size):
        last = min(first + size, len(bounds) - 1)
        yield slice(first, last), slice(bounds[first], bounds[last])
