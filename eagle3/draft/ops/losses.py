"""The losses, with their gradients.

With D the draft vocabulary, z the draft's logits, s = softmax(z), l the target's logits, true r = softmax(l)[D],
renormalised q = softmax(l[D]):

    kl         sum q log(q/s)                            dz = s - q            (true mass: r for q, dz = sum(r) s - r)
    ce         -log s[top]                               dz = s - onehot(top)
    lk_alpha   -log a,  a = sum min(r, s)                dz = -s ([s<r] - m)/a,  m = sum s [s<r]
    lk_lambda  w kl + (1-w)(1-a), w = scale exp(-decay a), w constant      (arXiv 2602.23881)

`top` is the target's most likely token over its whole vocabulary. Where it is outside D, kl on q and ce
are meaningless: these two are 0 there (the row still counts in the average), and every metric counts the draft as
wrong.

To add a loss, write its function, enter it in `LOSSES`, and add its name to `DraftSettings.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.ops.dispatch import compiled_on_gpu


class LossTarget(NamedTuple):
    """What the loss reads of R roots' target, besides its logits on the draft vocabulary. The target distribution is q,
    r or onehot(top), or 0 where a row carries no loss.
    """

    top: Tensor
    """[R] int64: the target's most likely token as an index into the draft vocabulary; -1 if it is outside"""
    lse: Tensor
    """[R]: r = exp(logits - lse)"""
    shift: Tensor
    """[R]: q or r = exp(logits - shift)"""
    mass: Tensor
    """[R], the sum of the target distribution"""
    negentropy: Tensor
    """[R], its sum of p log p"""


class Student(NamedTuple):
    """What a loss reads of m rows of the draft's logits."""

    exp: Tensor
    """[m, Vd] float32: exp(z - max z), which the loss may overwrite"""
    total: Tensor
    """[m, 1]: its sum, so that s = exp / total"""
    kl: Tensor
    """[m]: the divergence of s from the target distribution"""
    target: Tensor
    """[m, Vd]: the target distribution"""
    mass: Tensor
    """[m]: its sum"""
    true: Callable[[], Tensor]
    """computes r [m, Vd]"""
    lk_scale: float
    lk_decay: float


class Loss(NamedTuple):
    """A loss, and how its target is built."""

    compute: Callable[[Student, Tensor], tuple[Tensor, Tensor]]
    """Student and weights [m] -> unweighted loss [m] and the weighted gradient by z [m, Vd]"""
    one_hot: bool = False
    """whether the target distribution is onehot(top)"""
    fused: bool = False
    """whether `losses_kernel.cross_entropy` computes it on a GPU; others are compiled"""


def cross_entropy(student: Student, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute kl, or ce where the target is one-hot."""
    gradient = student.exp.mul_((student.mass * weights)[:, None] / student.total)
    return student.kl, gradient.addcmul_(student.target, weights[:, None], value=-1)


def lk_alpha(student: Student, weights: Tensor) -> tuple[Tensor, Tensor]:
    """-log of the acceptance."""
    _, accepted, d_accepted = _acceptance(student)
    # Where nothing at all can be accepted the gradient is 0/0; such rows give none.
    accepted = accepted.clamp_min(torch.finfo(torch.float32).tiny)
    gradient = -d_accepted / accepted[:, None]
    return -accepted.log(), gradient * weights[:, None]


def lk_lambda(student: Student, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A mix of kl and acceptance, weighted by the acceptance."""
    s, accepted, d_accepted = _acceptance(student)
    share = student.lk_scale * (-student.lk_decay * accepted).exp()
    value = share * student.kl + (1 - share) * (1 - accepted)
    d_kl = s * student.mass[:, None] - student.target
    gradient = share[:, None] * d_kl - (1 - share)[:, None] * d_accepted
    return value, gradient * weights[:, None]


def _acceptance(student: Student) -> tuple[Tensor, Tensor, Tensor]:
    """Return s, the acceptance sum min(r, s), and its gradient by z."""
    s, true = student.exp.div_(student.total), student.true()
    below = (s < true).float()
    d_accepted = s * (below - (s * below).sum(-1, keepdim=True))
    return s, torch.minimum(s, true).sum(-1), d_accepted


LOSSES = {
    "kl": Loss(cross_entropy, fused=True),
    "ce": Loss(cross_entropy, one_hot=True, fused=True),
    "lk_alpha": Loss(lk_alpha),
    "lk_lambda": Loss(lk_lambda),
}


def loss_target(
    top: Tensor, lse: Tensor, draft_lse: Tensor, negentropy: Tensor, *, one_hot: bool, true_mass: bool
) -> LossTarget:
    """Return the target of R roots from the teacher's sums (`eagle3.draft.data.row`).

    Args:
        top: [R] int64.
        lse: [R], log-sum-exp of l over the whole vocabulary.
        draft_lse: [R], over D.
        negentropy: [R], sum of q log q.
        one_hot: use onehot(top) as the target distribution.
        true_mass: use r in place of q.
    """
    if true_mass and not one_hot:
        mass = (draft_lse - lse).exp()
        return LossTarget(top, lse, lse, mass, mass * (negentropy + draft_lse - lse))
    known = (top >= 0).float()
    if one_hot:
        return LossTarget(top, lse, lse, known, torch.zeros_like(known))
    return LossTarget(top, lse, draft_lse.masked_fill(top < 0, torch.inf), known, negentropy * known)


@compiled_on_gpu
def value_and_gradient(
    logits: Tensor,
    target_logits: Tensor,
    teachers: Tensor,
    weights: Tensor,
    target: LossTarget,
    name: str,
    lk_scale: float,
    lk_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, choice and weighted gradient of logits [m, Vd] by rows `teachers` [m] of the target."""
    loss = LOSSES[name]
    if loss.one_hot:
        distribution = (target.top[:, None] == torch.arange(logits.shape[1], device=logits.device)).float()
    else:
        distribution = (target_logits - target.shift[:, None]).exp()
    z = logits.float()
    distribution, mass = distribution[teachers], target.mass[teachers]
    # Written so that the compiler makes one pass of all reductions; in place, since memory traffic is what costs.
    largest, choice = z.amax(-1, keepdim=True), z.argmax(-1)
    exp = (z - largest).exp_()
    total = exp.sum(-1, keepdim=True)
    kl = target.negentropy[teachers] - (distribution * z).sum(-1) + mass * (total.log() + largest)[:, 0]

    def true() -> Tensor:
        return (target_logits - target.lse[:, None]).exp()[teachers]

    value, gradient = loss.compute(Student(exp, total, kl, distribution, mass, true, lk_scale, lk_decay), weights)
    return value, choice, gradient.to(logits.dtype)
