"""The optimiser: Muon or AdamW for the matrices of the layer, AdamW for the rest; float32 masters, sharded over ranks,
without host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.draft import parallel
from eagle3.draft.model import HEAD
from eagle3.draft.muon import Muon
from eagle3.draft.settings import DraftSettings
from eagle3.draft.shards import Shards

BETAS = (0.9, 0.95)
# Where torch's fused kernel takes `grad_scale` and `found_inf` and heeds neither.
IGNORES_SCALE = frozenset({"mps"})


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
    """torch's fused AdamW on this rank's share, wherever that begins and ends."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: DraftSettings) -> None:
        # Matrices first: only they are decayed.
        parameters = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
        sizes = [parameter.numel() for parameter in parameters]
        decayed = sum(parameter.numel() for parameter in parameters if parameter.dim() >= 2)
        share = math.ceil(sum(sizes) / parallel.world())
        self.shards = Shards(parameters, [sum(sizes[:index]) for index in range(len(sizes))], share)
        cut = min(max(decayed - self.shards.own.start, 0), share)
        self.split = [cut, share - cut]
        self.masters = [nn.Parameter(part) for part in self.shards.masters.split(self.split)]
        for master, gradient in zip(self.masters, self.shards.shard.split(self.split), strict=True):
            master.grad = gradient
        decays = (settings.weight_decay, 0.0)
        groups = [{"params": [m], "weight_decay": d} for m, d in zip(self.masters, decays, strict=True)]
        self.adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=True)
        for master in self.masters:
            self.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def update(self, rate: float, scale: Tensor, skipped: Tensor) -> None:
        """Step with the gradients divided by `scale`; where `skipped` is 1, change nothing."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if scale.device.type in IGNORES_SCALE:
            if not skipped:
                self.shards.shard.div_(scale)
                self.adamw.step()
            return
        # Made for loss scaling: the kernel divides by the one and does nothing where the other is set.
        self.adamw.grad_scale, self.adamw.found_inf = scale, skipped  # type: ignore[attr-defined]
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Return the moments of all parameters and the step count, on every rank."""
        names = "exp_avg", "exp_avg_sq"
        moments = {
            name: self.shards.collect(torch.cat([self.adamw.state[master][name] for master in self.masters]))
            for name in names
        }
        return moments | {"step": self.adamw.state[self.masters[0]]["step"].cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, on any number of ranks."""
        for name in ("exp_avg", "exp_avg_sq"):
            for master, part in zip(self.masters, self.shards.own_part(state[name]).split(self.split), strict=True):
                self.adamw.state[master][name].copy_(part)
        for master in self.masters:
            self.adamw.state[master]["step"].copy_(state["step"])


def learning_rate(settings: DraftSettings, step: int, steps: int) -> float:
    """Return the rate of step 0..steps-1: linear warm-up, then cosine to 0."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
