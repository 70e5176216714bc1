"""The schedule of a training run: which rows each optimiser step reads, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.packing import pack


@dataclass(frozen=True)
class OptimizerStep:
    """The rows of one optimiser step."""

    epoch: int
    rows: Sequence[tuple[list[int], tuple[int, ...]]]
    """per row, its sample indices and the seed of its sampled unroll"""

    @property
    def members(self) -> list[int]:
        """All samples of the step."""
        return [index for members, _ in self.rows for index in members]


def plan(settings: DraftSettings, lengths: Sequence[int]) -> list[OptimizerStep]:
    """Return all steps of a run over samples of these lengths; every epoch packs the samples differently."""
    steps = []
    for epoch in range(settings.epochs):
        rows = pack(lengths, settings.batch_tokens, np.random.default_rng([settings.seed, epoch]))
        seeded = [(members, (settings.seed, epoch, index)) for index, members in enumerate(rows)]
        groups = range(0, len(seeded), settings.accumulate)
        steps += [OptimizerStep(epoch, seeded[index : index + settings.accumulate]) for index in groups]
    return steps


def learning_rate(settings: DraftSettings, step: int, steps: int) -> float:
    """Return the rate of step 0 .. steps-1: linear warm-up, then cosine to 0."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
