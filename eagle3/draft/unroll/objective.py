"""The objective: vocabulary projections, teacher, loss and gradients, chunk by chunk.

For root p and step t the student's logits are z_t[p] = lm_head h_t[p]; its teacher is the target's distribution for
x[p+2+t], l[p+t] = W N(y[p+1+t]), and p+t is a root, too. So the teacher of every root is computed once and serves all
steps. No [rows, vocabulary] tensor is ever whole: a chunk of teacher rows is projected together with all student
rows that it teaches, and gradients are computed on the spot: the loss is where backward starts.

With D the draft vocabulary, s = softmax(z), true r = softmax(l)[D], renormalised q = softmax(l[D]):

    kl         sum q log(q/s)                            dz = s - q            (true mass: r for q, dz = sum(r) s - r)
    ce         -log s[top]                               dz = s - onehot(top)
    lk_alpha   -log a,  a = sum min(r, s)                dz = -s ([s<r] - m)/a,  m = sum s [s<r]
    lk_lambda  w kl + (1-w)(1-a), w = scale exp(-decay a), w constant      (arXiv 2602.23881)

`top` is the target's most likely token over its whole vocabulary. Where it is outside D, kl on q and ce say nothing
true: such rows carry no loss there (they still count in the average), and the draft is wrong in every metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import Row
from eagle3.draft.ops.dispatch import compiled_on_gpu
from eagle3.draft.ops.layer import Weight, linear, project, weight_backward
from eagle3.target.weights import HeadWeights

# Bytes of one chunk's logits. On CPU small enough for the cache and for the allocator to reuse the memory.
CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 1 << 30}


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

    @property
    def student(self) -> tuple[str, float, float]:
        """What the student's gradient depends on."""
        return self.loss, self.lk_scale, self.lk_decay


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


class Outcome(NamedTuple):
    """What came of a row; of every pair (t, root) in the order of the unroll's outputs [M]."""

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
) -> Outcome:
    """Return the row's loss, its gradient, and what was drafted; add up the gradient of lm_head.

    Args:
        hidden: h_t of all steps [M, H], from `unroll`.
        lm_head: [Vd, H].
        teacher: the target's head.
        row: the row that `hidden` belongs to, built with summaries.
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
    lesson = _lesson(row, objective)
    for taught, chunk in _chunks(row, len(lm_head.value), device):
        target = project(row.teacher[taught], *teacher)
        states = hidden.index_select(0, row.pairs[chunk])
        logits = linear(states, lm_head)
        part = Lesson(*(values[taught] for values in lesson))
        loss, choice, d_logits = _student(logits, target, row, taught, chunk, weights[chunk], part, objective)
        losses.append(loss)
        choices.append(choice)
        if gradient is not None:
            torch.mm(d_logits, lm_head.value, out=gradient[chunk])
            weight_backward(d_logits, states, lm_head)
    loss, drafted = torch.cat(losses), torch.cat(choices)[row.pair_places]
    return Outcome(
        total=loss.dot(weights),
        gradient=None if gradient is None else gradient.index_select(0, row.pair_places),
        loss=loss[row.pair_places],
        drafted=drafted,
        correct=drafted == lesson.top[row.ahead],
    )


class Lesson(NamedTuple):
    """What R teacher rows teach, besides their logits on the draft vocabulary: the target distribution is q, r or
    onehot(top), or 0 where a row carries no loss.
    """

    top: Tensor
    """[R] int64, as in `Summary`"""
    lse: Tensor
    """[R]: r = exp(logits - lse)"""
    shift: Tensor
    """[R]: q or r = exp(logits - shift)"""
    mass: Tensor
    """[R], the sum of the target distribution"""
    negentropy: Tensor
    """[R], its sum of p log p"""


def _lesson(row: Row, objective: Objective) -> Lesson:
    assert row.summary is not None
    top, lse, draft_lse, negentropy = row.summary
    if objective.loss != "ce" and objective.true_mass:
        mass = (draft_lse - lse).exp()
        return Lesson(top, lse, lse, mass, mass * (negentropy + draft_lse - lse))
    known = (top >= 0).float()
    if objective.loss == "ce":
        return Lesson(top, lse, lse, known, torch.zeros_like(known))
    return Lesson(top, lse, draft_lse.masked_fill(top < 0, torch.inf), known, negentropy * known)


def _student(
    logits: Tensor,
    target: Tensor,
    row: Row,
    taught: slice,
    chunk: slice,
    weights: Tensor,
    lesson: Lesson,
    objective: Objective,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, choice and weighted gradient of a chunk's logits [m, Vd], by the target's logits [B, Vd]; the gradient may
    take the place of the logits.
    """
    if logits.is_cuda and not objective.loss.startswith("lk"):
        from eagle3.draft.ops import kernels

        offsets = row.pair_offsets[taught.start : taught.stop + 1]
        one_hot = objective.loss == "ce"
        value, choice = kernels.cross_entropy(logits, target, offsets, len(row.alive), weights, lesson, one_hot)
        return value, choice, logits
    teachers = row.ahead[row.pairs[chunk]] - taught.start
    return _taught(logits, target, teachers, weights, lesson, *objective.student)


@compiled_on_gpu
def _taught(
    logits: Tensor,
    target_logits: Tensor,
    teachers: Tensor,
    weights: Tensor,
    lesson: Lesson,
    loss: str,
    lk_scale: float,
    lk_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, choice and weighted gradient of logits [m, Vd] taught by rows `teachers` [m] of a lesson."""
    if loss == "ce":
        target = (lesson.top[:, None] == torch.arange(logits.shape[1], device=logits.device)).float()
    else:
        target = (target_logits - lesson.shift[:, None]).exp()
    z = logits.float()
    target, mass = target[teachers], lesson.mass[teachers]
    # Written so that the compiler makes one pass of all reductions; in place, since memory traffic is what costs.
    largest, choice = z.amax(-1, keepdim=True), z.argmax(-1)
    student = (z - largest).exp_()
    total = student.sum(-1, keepdim=True)
    value = lesson.negentropy[teachers] - (target * z).sum(-1) + mass * (total.log() + largest)[:, 0]
    if not loss.startswith("lk"):
        gradient = student.mul_((mass * weights)[:, None] / total).addcmul_(target, weights[:, None], value=-1)
        return value, choice, gradient.to(logits.dtype)
    student.div_(total)
    true = (target_logits - lesson.lse[:, None]).exp()[teachers]
    below = (student < true).float()
    accepted = torch.minimum(student, true).sum(-1)
    d_accepted = student * (below - (student * below).sum(-1, keepdim=True))
    if loss == "lk_alpha":
        # Where nothing at all can be accepted the gradient is 0/0; such rows give none.
        accepted = accepted.clamp_min(torch.finfo(torch.float32).tiny)
        value, gradient = -accepted.log(), -d_accepted / accepted[:, None]
    else:
        share = lk_scale * (-lk_decay * accepted).exp()
        value = share * value + (1 - share) * (1 - accepted)
        gradient = share[:, None] * (student * mass[:, None] - target) - (1 - share)[:, None] * d_accepted
    return value, choice, (gradient * weights[:, None]).to(logits.dtype)


def _chunks(row: Row, Vd: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut the teacher rows so that the students' logits fit the budget.

    Yields:
        a slice of teacher rows, and the slice of `row.pairs` that they teach.
    """
    width = 4 * Vd * len(row.alive)
    size = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // width)
    bounds = row.pair_bounds
    for first in range(0, len(bounds) - 1, size):
        last = min(first + size, len(bounds) - 1)
        yield slice(first, last), slice(bounds[first], bounds[last])
