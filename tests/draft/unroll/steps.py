"""The steps of a training run, one by one, on made-up hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.data.loader import TrainingSample
from eagle3.draft.data.packing import context_length
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.network import Draft
from eagle3.draft.training.trainer import Trainer
from eagle3.hidden_states.reader import HiddenStateSample
from eagle3.target.weights import HeadWeights


class Steps:
    """Rows of real conversations' lengths, one a step; the last step, after which a run would log, is not taken."""

    def __init__(
        self, draft: Draft, head: HeadWeights, settings: DraftSettings, samples: int, folder: Path, *, shrink: int = 1
    ) -> None:
        """Make a trainer on the device of `draft`; `shrink` divides the lengths."""
        device = draft.lm_head.weight.device
        self.random, self.head = np.random.default_rng(0), head
        spans = [[self._span(shrink)] for _ in range(samples)]
        kept = [TrainingSample(str(i), "made up", span, context_length(span), b"") for i, span in enumerate(spans)]
        settings = settings.model_copy(update={"log_every": samples})
        reader: Any = None
        self.trainer = Trainer(
            settings,
            draft,
            head,
            kept,
            [],
            reader,
            machine=MachineSettings(),
            folder=folder,
            identity={},
            device=device,
        )
        teacher_head = TeacherHead(head, draft.target_ids, device, self.trainer.embedding.dtype)
        self.rows = [self._row(kept, step.members, teacher_head) for step in self.trainer.steps[:-1]]

    def take(self, number: int) -> None:
        """Take a step."""
        self.trainer._step(number, iter([self.rows[number]]))

    def _span(self, shrink: int) -> tuple[int, int]:
        """The span of an answer after a prompt of about 160 tokens; about 560 tokens, sometimes three times as many."""
        prompt, answer = (self.random.lognormal((5.07, 6.33), (0.6, 0.55)) / shrink).astype(int).tolist()
        return prompt + 1, prompt + answer + 6

    def _row(self, samples: list[TrainingSample], members: list[int], teacher_head: TeacherHead) -> Row:
        pairs = [(self._states(samples[index]), samples[index].spans) for index in members]
        row = build_row(pairs, self.trainer.settings.unroll)
        row = row.with_teacher_stats([teacher_head(row.teacher)])
        return row.pin_memory() if self.trainer.loader.pin_memory else row

    def _states(self, sample: TrainingSample) -> HiddenStateSample:
        generator = torch.Generator().manual_seed(int(sample.id))
        [(start, end)] = sample.spans
        V, H = self.head.embedding.shape
        layers = len(self.trainer.draft.config.aux_layer_ids)
        states = torch.randn(end, layers + 1, H, generator=generator).bfloat16()
        ids = torch.randint(V, (end,), generator=generator, dtype=torch.int32)
        return HiddenStateSample(
            sample.id, ids, states[:, :-1], states[start - 1 : end - 1, -1], torch.arange(start - 1, end - 1)
        )
