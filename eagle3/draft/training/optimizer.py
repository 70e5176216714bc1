"""The optimiser: Muon or AdamW for the matrices of the layer, AdamW for the rest; float32 masters, sharded over ranks,
without host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.config.draft import DraftSettings
from eagle3.draft.model.config import HEAD
from eagle3.draft.ops.adamw import BETAS, adamw
from eagle3.draft.training import parallel
from eagle3.draft.training.muon import Muon
from eagle3.draft.training.shards import Shards


class Optimizer:
    """Owns the storage of the parameters and their gradients."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: DraftSettings) -> None:
        """Take named parameters."""
        self.settings = settings
        # The rows of lm_head belong to tokens: it is a table rather than a map between states.
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters:
            chosen = settings.optimizer == "muon" and parameter.dim() == 2 and name != HEAD
            (matrices if chosen else others).append(parameter)
        self.parts: dict[str, Muon | AdamW] = {"adamw": AdamW(others, settings)}
        if matrices:
            self.parts["muon"] = Muon(matrices, settings.weight_decay)
        # The running mean of the gradient's norm; 0 before the first step.
        self.usual = torch.zeros((), device=others[0].device)

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Update the parameters from the gradients accumulated on every rank, and clear the gradients.

        A step whose gradient is not finite, or `max_grad_growth` times as long as usual, changes nothing.

        Returns:
            the gradient's norm before clipping and whether the step was skipped (0.0 or 1.0), both on the device.
        """
        for part in self.parts.values():
            part.shards.reduce()
        square = (
            torch.stack([torch.linalg.vector_norm(part.shards.shard) for part in self.parts.values()]).square().sum()
        )
        if dist.is_initialized():
            dist.all_reduce(square)
        norm = square.sqrt()
        exploded = (self.usual > 0) & (norm > self.settings.max_grad_growth * self.usual)
        skipped = (exploded | ~norm.isfinite()).float()
        # The first norm counts whole, later ones a tenth.
        known = torch.where(self.usual > 0, self.usual.lerp(norm, 0.1), norm)
        self.usual = torch.where(skipped.bool(), self.usual, known)
        scale = (norm / self.settings.max_grad_norm).clamp_min(1.0)
        for part in self.parts.values():
            part.update(learning_rate, scale, skipped)
            part.shards.publish()
        return norm, skipped

    def state(self) -> dict[str, Tensor]:
        """Return what the steps so far left behind, whole; on every rank."""
        parts = {f"{name}.{key}": value for name, part in self.parts.items() for key, value in part.state().items()}
        return parts | {"usual": self.usual.cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, on any number of ranks."""
        self.usual.copy_(state["usual"])
        for name, part in self.parts.items():
            start = f"{name}."
            part.load_state({key.removeprefix(start): value for key, value in state.items() if key.startswith(start)})


class AdamW:
    """AdamW (arXiv 1711.05101) on this rank's share, wherever that begins and ends."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: DraftSettings) -> None:
        # Matrices first: only they are decayed.
        parameters = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
        sizes = [parameter.numel() for parameter in parameters]
        decayed = sum(parameter.numel() for parameter in parameters if parameter.dim() >= 2)
        share = math.ceil(sum(sizes) / parallel.world())
        self.shards = Shards(parameters, [sum(sizes[:index]) for index in range(len(sizes))], share)
        self.moments = {name: torch.zeros_like(self.shards.masters) for name in ("exp_avg", "exp_avg_sq")}
        # Steps that were not skipped.
        self.count = torch.zeros((), device=self.shards.masters.device)
        self.logs = torch.tensor([math.log(beta) for beta in BETAS], device=self.shards.masters.device)
        cut = min(max(decayed - self.shards.own.start, 0), share)
        flat = self.shards.masters, *self.moments.values(), self.shards.shard
        self.groups = list(zip((settings.weight_decay, 0.0), *(x.split([cut, share - cut]) for x in flat), strict=True))

    def update(self, rate: float, scale: Tensor, skipped: Tensor) -> None:
        """Step with the gradients divided by `scale`, or, where `skipped` is 1, change nothing; clear the gradients."""
        self.count += 1 - skipped
        # 1 - beta^count on the device; in float32 expm1 keeps it within 1e-7 from the first step on.
        corrections = -torch.expm1(self.count * self.logs)
        for decay, values, first, second, gradient in self.groups:
            if len(values):
                adamw(values, first, second, gradient, scale, skipped, corrections, rate, decay)

    def state(self) -> dict[str, Tensor]:
        """Return the moments of all parameters and the step count, on every rank."""
        moments = {name: self.shards.collect(moment) for name, moment in self.moments.items()}
        return moments | {"step": self.count.cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, on any number of ranks."""
        for name, moment in self.moments.items():
            moment.copy_(self.shards.own_part(state[name]))
        self.count.copy_(state["step"])


def learning_rate(settings: DraftSettings, step: int, steps: int) -> float:
    """Return the rate of step 0..steps-1: linear warm-up, then cosine to 0."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
