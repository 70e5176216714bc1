"""Muon for the matrices of a draft model: updates with all singular values near 1.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024; scaled to AdamW's typical step as in
"Muon is scalable for LLM training" (arXiv 2502.16982), so that both take one learning rate. torch.optim.Muon computes
the same, but cannot skip a step without waiting for the GPU, nor split the work among processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from eagle3.draft import parallel
from eagle3.draft.ops.dispatch import CudaGraphed
from eagle3.draft.training.flat_parameters import FlatParameters

MOMENTUM = 0.95
# Newton-Schulz iteration of fifth order; these coefficients trade exactness for speed near zero.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
# Root mean square of AdamW's typical step, as a multiple of its learning rate.
STEP = 0.2


# Elements from which a matrix's products take the GPU longer than their launches take the host.
LARGE = 1 << 22


class Muon:
    """Muon, with every matrix assigned to one process: orthogonalising needs all of it.

    All shares are as long as the longest, so many processes for few matrices cost memory and traffic: with 8 processes
    the buffers are 1.6 times as large as the matrices at Llama-3.1-8B's size.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        sizes = [parameter.numel() for parameter in parameters]
        owned = assign(sizes, parallel.world())
        share = max(sum(sizes[index] for index in indices) for indices in owned)
        offsets = [0] * len(parameters)
        for rank, indices in enumerate(owned):
            starts = itertools.accumulate((sizes[index] for index in indices), initial=rank * share)
            for index, start in zip(indices, starts, strict=False):
                offsets[index] = start
        self.flat = FlatParameters(parameters, offsets, share)
        self.momentum = torch.zeros_like(self.flat.own_gradients)
        # This process's matrices: weight, summed gradient and momentum of each.
        flat = self.flat.masters, self.flat.own_gradients, self.momentum
        mine = [parameters[index] for index in owned[parallel.rank()]]
        used = sum(matrix.numel() for matrix in mine)
        parts = zip(*(x[:used].split([matrix.numel() for matrix in mine]) for x in flat), strict=True)
        self.matrices = [[x.view_as(matrix) for x in part] for matrix, part in zip(mine, parts, strict=True)]
        # A CUDA graph keeps all intermediate tensors: worth it where launches cost more than the kernels' work.
        small = max((matrix.numel() for matrix in mine), default=LARGE) < LARGE
        self.apply: Callable[..., None] = CudaGraphed(self._update) if small else self._update

    def update(self, rate: float, scale: Tensor, skipped: Tensor) -> None:
        """Step with the gradients divided by `scale`, or, where `skipped` is 1, change nothing; clear the gradients."""
        self.apply(scale, skipped, (1 - skipped) * rate)
        self.flat.own_gradients.zero_()

    def _update(self, scale: Tensor, skipped: Tensor, rate: Tensor) -> None:
        for matrix, gradient, momentum in self.matrices:
            # With the momentum in the gradient's place, the momentum does not change.
            clipped = torch.where(skipped.bool(), momentum, gradient / scale)
            momentum.lerp_(clipped, 1 - MOMENTUM)
            direction = orthogonal(clipped.lerp(momentum, MOMENTUM))
            matrix.mul_(1 - rate * self.weight_decay)
            matrix.sub_(direction * (rate * (STEP * math.sqrt(max(matrix.shape)))))

    def state(self) -> dict[str, Tensor]:
        """Return the momenta of all matrices, in every process."""
        return {"momentum": self.flat.collect(self.momentum)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in any number of processes."""
        self.momentum.copy_(self.flat.own_part(state["momentum"]))


def assign(sizes: Sequence[int], processes: int) -> list[list[int]]:
    """Assign parameters to processes, the largest first, each to the process that has the fewest elements.

    Returns:
        ascending parameter indices for each process, so that the gradients of matrices that are read together are
        adjacent where one process owns them all.
    """
    owned: list[list[int]] = [[] for _ in range(processes)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(owned, key=lambda indices: sum(sizes[i] for i in indices)).append(index)
    return [sorted(indices) for indices in owned]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return [m, n] with all singular values brought near 1 (about 0.7 to 1.2), singular vectors kept."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x if len(x) <= x.shape[1] else x.mT
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=B, alpha=C), wide, beta=A)
    return (wide if len(x) <= x.shape[1] else wide.mT).to(matrix.dtype)
