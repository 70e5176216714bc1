"""The optimiser: Muon or AdamW for the matrices of the layer, AdamW for the rest.

Master weights are float32 and split among processes; a step never waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.config.draft import DraftSettings
from eagle3.draft import parallel
from eagle3.draft.model.config import HEAD
from eagle3.draft.ops.adamw import BETAS, adamw
from eagle3.draft.training.flat_parameters import FlatParameters
from eagle3.draft.training.muon import Muon


class Optimizer:
    """Owns the storage of the parameters and their gradients."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: DraftSettings) -> None:
        """Take named parameters."""
        self.settings = settings
        # lm_head is a table with a row per token rather than a map between states, so AdamW takes it.
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters:
            chosen = settings.optimizer == "muon" and parameter.dim() == 2 and name != HEAD
            (matrices if chosen else others).append(parameter)
        self.parts: dict[str, Muon | AdamW] = {"adamw": AdamW(others, settings)}
        if matrices:
            self.parts["muon"] = Muon(matrices, settings.weight_decay)
        # Running mean; 0 before the first step.
        self.mean_grad_norm = torch.zeros((), device=others[0].device)

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Update the parameters from the gradients accumulated in every process, and clear the gradients.

        A step changes nothing if the gradient norm is not finite, or above `max_grad_growth` times its running mean.

        Returns:
            the gradient norm before clipping and whether the step was skipped (0.0 or 1.0), both on the device.
        """
        for part in self.parts.values():
            part.flat.reduce()
        square = (
            torch.stack([torch.linalg.vector_norm(part.flat.own_gradients) for part in self.parts.values()])
            .square()
            .sum()
        )
        if dist.is_initialized():
            dist.all_reduce(square)
        norm = square.sqrt()
        exploded = (self.mean_grad_norm > 0) & (norm > self.settings.max_grad_growth * self.mean_grad_norm)
        skipped = (exploded | ~norm.isfinite()).float()
        # The first norm counts in full, later ones a tenth.
        updated = torch.where(self.mean_grad_norm > 0, self.mean_grad_norm.lerp(norm, 0.1), norm)
        self.mean_grad_norm = torch.where(skipped.bool(), self.mean_grad_norm, updated)
        scale = (norm / self.settings.max_grad_norm).clamp_min(1.0)
        for part in self.parts.values():
            part.update(learning_rate, scale, skipped)
            part.flat.publish()
        return norm, skipped

    def state(self) -> dict[str, Tensor]:
        """Return the state of the steps so far, complete in every process."""
        parts = {f"{name}.{key}": value for name, part in self.parts.items() for key, value in part.state().items()}
        return parts | {"mean_grad_norm": self.mean_grad_norm.cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in any number of processes."""
        self.mean_grad_norm.copy_(state["mean_grad_norm"])
        for name, part in self.parts.items():
            start = f"{name}."
            part.load_state({key.removeprefix(start): value for key, value in state.items() if key.startswith(start)})


class AdamW:
    """AdamW (arXiv 1711.05101) on this process's share, wherever that begins and ends."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: DraftSettings) -> None:
        # Matrices first: weight decay applies to them only.
        parameters = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
        sizes = [parameter.numel() for parameter in parameters]
        decayed = sum(parameter.numel() for parameter in parameters if parameter.dim() >= 2)
        share = math.ceil(sum(sizes) / parallel.world())
        self.flat = FlatParameters(parameters, [sum(sizes[:index]) for index in range(len(sizes))], share)
        self.moments = {name: torch.zeros_like(self.flat.masters) for name in ("exp_avg", "exp_avg_sq")}
        # Steps that were not skipped.
        self.count = torch.zeros((), device=self.flat.masters.device)
        self.logs = torch.tensor([math.log(beta) for beta in BETAS], device=self.flat.masters.device)
        cut = min(max(decayed - self.flat.own.start, 0), share)
        flat = self.flat.masters, *self.moments.values(), self.flat.own_gradients
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
        """Return the moments of all parameters and the step count, in every process."""
        moments = {name: self.flat.collect(moment) for name, moment in self.moments.items()}
        return moments | {"step": self.count.cpu()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in any number of processes."""
        for name, moment in self.moments.items():
            moment.copy_(self.flat.own_part(state[name]))
        self.count.copy_(state["step"])
