"""One step of AdamW (arXiv 1711.05101)."""

from __future__ import annotations

from torch import Tensor

BETAS = (0.9, 0.95)
EPS = 1e-8


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
    """Update values and their moments in place, unless `skipped`; clear the gradient.

    Args:
        values: [n] float32, as the next three.
        first: mean of the gradients.
        second: mean of their squares.
        gradient: may hold anything where the step is skipped.
        scale: [] float32, by which the gradient is divided.
        skipped: [] float32, 0 or 1.
        corrections: [2] float32, 1 - beta^steps of the two moments.
        rate: the learning rate.
        decay: decoupled weight decay, times the rate.
    """
    if values.is_cuda:
        from eagle3.draft.ops.adamw_kernel import adamw as kernel

        kernel(values, first, second, gradient, scale, skipped, corrections, rate, decay)
        return
    if not skipped:
        gradient.div_(scale)
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        direction = first / (second / corrections[1]).sqrt_().add_(EPS)
        values.mul_(1 - rate * decay).sub_(direction.mul_(rate / corrections[0]))
    gradient.zero_()
