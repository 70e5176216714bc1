"""Muon for the matrices of a draft: every step has all its singular values near 1.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024; scaled to AdamW's usual step as in
"Muon is scalable for LLM training" (arXiv 2502.16982), so that both take one learning rate. torch.optim.Muon computes
the same, but can neither skip a step without asking the GPU first nor share the work among ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from eagle3.draft.ops.dispatch import CudaGraphed
from eagle3.draft.training import parallel
from eagle3.draft.training.shards import Shards

MOMENTUM = 0.95
# Newton-Schulz iteration of fifth order; these coefficients trade exactness for speed near zero.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
# Root mean square of AdamW's typical step, by its learning rate.
STEP = 0.2


# Elements of a matrix whose products take the GPU longer than their launches take the host.
LARGE = 1 << 22


class Muon:
    """Matrices are dealt to ranks whole: orthogonalising needs all of one.

    Shares are as long as the longest, so many ranks for few matrices cost memory and traffic: with 8 ranks the
    buffers are 1.6 times as large as the matrices at Llama-3.1-8B's size.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        sizes = [parameter.numel() for parameter in parameters]
        hands = deal(sizes, parallel.world())
        share = max(sum(sizes[index] for index in hand) for hand in hands)
        offsets = [0] * len(parameters)
        for rank, hand in enumerate(hands):
            starts = itertools.accumulate((sizes[index] for index in hand), initial=rank * share)
            for index, start in zip(hand, starts, strict=False):
                offsets[index] = start
        self.shards = Shards(parameters, offsets, share)
        self.momentum = torch.zeros_like(self.shards.shard)
        # This rank's: weight, summed gradient and momentum of each.
        flat = self.shards.masters, self.shards.shard, self.momentum
        mine = [parameters[index] for index in hands[parallel.rank()]]
        used = sum(matrix.numel() for matrix in mine)
        parts = zip(*(x[:used].split([matrix.numel() for matrix in mine]) for x in flat), strict=True)
        self.matrices = [[x.view_as(matrix) for x in part] for matrix, part in zip(mine, parts, strict=True)]
        # Recording keeps all intermediate tensors for good: worth it where launches cost more than the kernels' work.
        small = max((matrix.numel() for matrix in mine), default=LARGE) < LARGE
        self.apply: Callable[..., None] = CudaGraphed(self._update) if small else self._update

    def update(self, rate: float, scale: Tensor, skipped: Tensor) -> None:
        """Step with the gradients divided by `scale`, or, where `skipped` is 1, change nothing; clear the gradients."""
        self.apply(scale, skipped, (1 - skipped) * rate)
        self.shards.shard.zero_()

    def _update(self, scale: Tensor, skipped: Tensor, rate: Tensor) -> None:
        for matrix, gradient, momentum in self.matrices:
            # The momentum in the gradient's place leaves the momentum as it is.
            clipped = torch.where(skipped.bool(), momentum, gradient / scale)
            momentum.lerp_(clipped, 1 - MOMENTUM)
            direction = orthogonal(clipped.lerp(momentum, MOMENTUM))
            matrix.mul_(1 - rate * self.weight_decay)
            matrix.sub_(direction * (rate * (STEP * math.sqrt(max(matrix.shape)))))

    def state(self) -> dict[str, Tensor]:
        """Return the momenta of all matrices, on every rank."""
        return {"momentum": self.shards.collect(self.momentum)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, on any number of ranks."""
        self.momentum.copy_(self.shards.own_part(state["momentum"]))


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal parameters to ranks, the largest first, each to the rank that has the least; return indices in order.

    In order, so that the gradients of matrices that are read together lie together where one rank has them all.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(hands, key=lambda hand: sum(sizes[i] for i in hand)).append(index)
    return [sorted(hand) for hand in hands]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return [m, n] with all singular values brought near 1 (about 0.7 to 1.2), singular vectors kept."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x if len(x) <= x.shape[1] else x.mT
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=B, alpha=C), wide, beta=A)
    return (wide if len(x) <= x.shape[1] else wide.mT).to(matrix.dtype)
