"""AdamW on float32 masters, sharded over ranks (ZeRO), without host synchronisation.

All parameters live in one flat buffer, their gradients in another. Ranks sum gradients with one reduce-scatter, each
updates its share of the masters and moments, and one all-gather spreads the result. With one rank that is plain AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.draft import parallel
from eagle3.draft.settings import DraftSettings

BETAS = (0.9, 0.95)
# Where torch's fused kernel takes `grad_scale` and `found_inf` and heeds neither.
IGNORES_SCALE = frozenset({"mps"})


class Optimizer:
    """Owns the parameters' storage: after construction they are views into it."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: DraftSettings) -> None:
        self.settings = settings
        world, rank = parallel.world(), parallel.rank()
        # Matrices first: only they are decayed.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
        decayed = sum(parameter.numel() for parameter in self.parameters if parameter.dim() >= 2)
        self.size = sum(parameter.numel() for parameter in self.parameters)
        share = math.ceil(self.size / world)
        device = self.parameters[0].device
        self.values = torch.zeros(share * world, device=device)
        self.gradients = torch.zeros_like(self.values)
        offset = 0
        for parameter in self.parameters:
            part = slice(offset, offset + parameter.numel())
            self.values[part] = parameter.detach().flatten()
            parameter.data = self.values[part].view_as(parameter)
            parameter.grad = self.gradients[part].view_as(parameter)
            offset = part.stop
        self.share = slice(rank * share, (rank + 1) * share)
        self.shard = self.gradients[self.share] if world == 1 else torch.zeros(share, device=device)
        cut = min(max(decayed - self.share.start, 0), share)
        self.masters = [nn.Parameter(part) for part in self.values[self.share].split([cut, share - cut])]
        for master, gradient in zip(self.masters, self.shard.split([cut, share - cut]), strict=True):
            master.grad = gradient
        decays = (settings.weight_decay, 0.0)
        groups = [{"params": [m], "weight_decay": d} for m, d in zip(self.masters, decays, strict=True)]
        self.adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=True)
        for master in self.masters:
            self.adamw.state[master] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Update the parameters from the gradients accumulated on every rank, and clear the gradients.

        A step whose gradient is not finite changes nothing.

        Returns:
            the gradient's norm before clipping and whether the step was skipped (0.0 or 1.0), both on the device.
        """
        distributed = dist.is_initialized()
        if distributed:
            dist.reduce_scatter_tensor(self.shard, self.gradients)
        norm = torch.linalg.vector_norm(self.shard)
        if distributed:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
        skipped = 1.0 - norm.isfinite().float()
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self._update((norm / self.settings.max_grad_norm).clamp_min(1.0), skipped)
        if distributed:
            dist.all_gather_into_tensor(self.values, self.values[self.share].clone())
        self.gradients.zero_()
        return norm, skipped

    def _update(self, scale: Tensor, skipped: Tensor) -> None:
        """Step with the gradients divided by `scale`, unless `skipped`."""
        if self.shard.device.type in IGNORES_SCALE:
            if not skipped:
                self.shard.div_(scale)
                self.adamw.step()
            return
        # Made for loss scaling: the kernel divides by the one and does nothing where the other is set.
        self.adamw.grad_scale, self.adamw.found_inf = scale, skipped  # type: ignore[attr-defined]
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Return the moments of all parameters, whole and in flat order, and the step count; on every rank."""
        moments = {}
        for name in ("exp_avg", "exp_avg_sq"):
            shard = torch.cat([self.adamw.state[master][name] for master in self.masters])
            if dist.is_initialized():
                whole = torch.empty_like(self.values)
                dist.all_gather_into_tensor(whole, shard)
                shard = whole
            moments[name] = shard[: self.size].cpu()
        return moments | {"step": self.adamw.state[self.masters[0]]["step"].cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the moments that `state` returned, on any number of ranks."""
        for name in ("exp_avg", "exp_avg_sq"):
            whole = torch.zeros_like(self.values)
            whole[: self.size] = state[name]
            sizes = [master.numel() for master in self.masters]
            for master, part in zip(self.masters, whole[self.share].split(sizes), strict=True):
                self.adamw.state[master][name].copy_(part)
        for master in self.masters:
            self.adamw.state[master]["step"].copy_(state["step"])


def learning_rate(settings: DraftSettings, step: int, steps: int) -> float:
    """Return the rate of step 0..steps-1: linear warm-up, then cosine to 0."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
