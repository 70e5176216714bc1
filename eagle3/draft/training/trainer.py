"""The trainer: runs the steps of a training run, with its logs, evaluations and checkpoints.

With several processes, each runs the same steps on its share of the rows; sums are exchanged where they are needed,
and process 0 writes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.acceptance.figures import acceptance_figures
from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import Progress, say
from eagle3.draft import parallel
from eagle3.draft.data.loader import RowLoader, TrainingSample
from eagle3.draft.data.row import Row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.config import NAME, WEIGHTS
from eagle3.draft.model.network import Draft
from eagle3.draft.ops.dispatch import pass_dtype
from eagle3.draft.training.checkpoint import Checkpoints
from eagle3.draft.training.evaluation import evaluate
from eagle3.draft.training.logs import LOG, TIMING, TrainingLogs
from eagle3.draft.training.metrics import Tally, expected_acceptance_length
from eagle3.draft.training.optimizer import Optimizer
from eagle3.draft.training.schedule import OptimizerStep, learning_rate, plan
from eagle3.draft.training.timing import Timing
from eagle3.draft.training.trackers import trackers
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import Weights, prepare
from eagle3.errors import Eagle3Error
from eagle3.files.atomic import atomic_write
from eagle3.files.records import write_json
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.weights import HeadWeights


@dataclass
class TrainingState:
    """The progress of a run; part of every checkpoint, as JSON."""

    step: int = 0
    """finished optimiser steps"""
    evaluated: int = 0
    """the step of the last evaluation"""
    tokens: int = 0
    """context positions of the finished steps"""
    supervised: int = 0
    """their roots"""
    best_step: int | None = None
    best_length: float = 0.0
    """the acceptance length at `best_step`"""


class Trainer:
    """A training run in one work folder, from its last checkpoint to its artifact."""

    def __init__(
        self,
        settings: DraftSettings,
        draft: Draft,
        head: HeadWeights,
        samples: Sequence[TrainingSample],
        held_out: Sequence[TrainingSample],
        reader: HiddenStateReader,
        *,
        machine: MachineSettings,
        folder: Path,
        identity: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Take an initialised `draft`; `identity` is what must not change until the run is finished."""
        self.settings, self.machine, self.folder, self.device = settings, machine, folder, device
        self.identity = identity
        dtype = pass_dtype(device)
        self.draft = draft.to(device)
        self.optimizer = Optimizer(self.draft.named_parameters(), settings)
        self.embedding = head.embedding.to(device, dtype)
        self.teacher = Teacher.of(head, draft.target_ids, device, dtype)
        decay = settings.decay if settings.sampled_unroll else None
        self.loader = RowLoader(samples, reader, settings.unroll, device, decay)
        self.held_out = RowLoader(held_out, reader, settings.unroll, device)
        self.objective = Objective.of(settings, sampled=settings.sampled_unroll)
        self.writes = parallel.rank() == 0
        self.checkpoints = Checkpoints(folder, identity)
        self.steps = plan(settings, [sample.context for sample in samples])
        self.tally = Tally(settings.unroll, device)
        # Skipped steps: in total, in a row up to now, and the longest streak since the last check.
        self.skipped, self.streak, self.longest_streak = (torch.zeros((), device=device) for _ in range(3))
        self.timing = Timing(draft.config, device) if device.type == "cuda" else None
        self.logs = TrainingLogs(folder, (LOG, TIMING) if self.timing else (LOG,))
        self.state = TrainingState()
        self.saved_step = 0
        self.asked_to_end = False

    def train(self, teacher_head: TeacherHead) -> dict[str, Any]:
        """Run the remaining steps, write the artifact, and return its counts."""
        for name, loader in (("train", self.loader), ("evaluation", self.held_out)):
            key = " ".join(str(self.identity[part]) for part in ("target", "vocabulary", name))
            loader.load_teacher_stats(teacher_head, self.folder / f".teacher-stats-{name}", key)
        # The target's whole head takes memory, and nothing reads it from here on.
        del teacher_head
        self._resume()
        first = self.state.step
        rows = self.loader.stream(row for step in self.steps[first:] for row in self._share(step))
        total = sum(sample.context for sample in self.loader.samples) * self.settings.epochs
        with self._noting_sigterm(), self._open_logs(), Progress(total if self.writes else 0, "draft", "tokens") as bar:
            bar.update(self.state.tokens)
            if self.timing is not None:
                self.timing.restart()
            # If the last start was asked to end during an evaluation, that evaluation is still due.
            self._evaluate_when_due()
            for number in range(first, len(self.steps)):
                before = self.state.tokens
                self._step(number, rows)
                bar.update(self.state.tokens - before)
                self._evaluate_when_due()
                if self._due(self.machine.checkpoint_every):
                    self._save()
                # Processes communicate only where they wait for each other anyway.
                if parallel.world() == 1 or self._due(self.settings.log_every):
                    self._end_if_asked()
        return self._finish()

    def _step(self, number: int, rows: Iterator[Row]) -> None:
        step, settings = self.steps[number], self.settings
        totals = self.loader.counts(step.members).tolist()
        weights = prepare(self.draft, self.embedding.dtype, float8=settings.float8)
        for _ in self._share(step):
            self._accumulate(weights, self._next(rows), totals)
        rate = learning_rate(settings, number, len(self.steps))
        norm, skipped = self.optimizer.step(rate)
        self.streak = (self.streak + skipped) * skipped
        self.longest_streak = torch.maximum(self.longest_streak, self.streak)
        self.skipped += skipped
        self.state.step = number + 1
        self.state.tokens += sum(self.loader.samples[index].context for index in step.members)
        self.state.supervised += totals[0]
        if self._due(settings.log_every):
            self._check_streak()
            self._log(self._train_record(step.epoch, rate, float(norm)))
            if self.timing is not None:
                self._log(self.timing.read(self.state.step), TIMING)

    def _share(self, step: OptimizerStep) -> Sequence[tuple[list[int], tuple[int, ...]]]:
        """Return this process's rows of a step."""
        return step.rows[parallel.rank() :: parallel.world()]

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == len(self.steps)

    def _next(self, rows: Iterator[Row]) -> Row:
        asked = time.perf_counter()
        row = next(rows)
        if self.timing is not None:
            self.timing.wait(time.perf_counter() - asked)
            self.timing.add(row)
        return row.to(self.device)

    def _accumulate(self, weights: Weights, row: Row, totals: Sequence[int]) -> None:
        """Add one row's gradients."""
        hidden = unroll(weights, row, self.embedding)
        output = projected_loss(hidden, weights.lm_head, self.teacher, row, self.objective, totals)
        hidden.backward(output.gradient)
        self.tally.add(row, output)

    def _train_record(self, epoch: int, rate: float, norm: float) -> dict[str, Any]:
        return {
            "kind": "train",
            "step": self.state.step,
            "epoch": epoch,
            "learning_rate": rate,
            "grad_norm": norm,
            "skipped_steps": int(self.skipped),
            "tokens": self.state.tokens,
            "supervised_tokens": self.state.supervised,
            **self.tally.reduce().read(),
        }

    def _check_streak(self) -> None:
        longest, step = int(self.longest_streak), self.state.step
        self.longest_streak = self.streak.clone()
        if longest >= self.settings.max_skipped:
            first = max(step - max(longest, self.settings.log_every), 0)
            members = [index for step in self.steps[first:step] for index in step.members]
            ids = [self.loader.samples[index].id for index in members]
            raise Eagle3Error(
                f"the gradient was not finite in {longest} steps in a row, or its norm far above the running mean",
                where=f"steps {first + 1} to {step}, samples {', '.join(ids[:200])}{' ...' if len(ids) > 200 else ''}",
                expected=f"at most {self.settings.max_skipped - 1} such steps in a row (draft.max_skipped)",
                remedy="lower draft.learning_rate, or look for damaged hidden states in these samples",
            )

    def _evaluate_when_due(self) -> None:
        step = self.state.step
        if self.state.evaluated < step and self._due(self.settings.evaluate_every):
            record = self._evaluate(self.steps[step - 1].epoch)
            self.state.evaluated = step
            self._log(record)

    def _evaluate(self, epoch: int) -> dict[str, Any]:
        """Evaluate on the held-out split and keep the weights if they are the best so far."""
        settings, step = self.settings, self.state.step
        draft_tokens = min(settings.evaluate_drafts, settings.unroll)
        found = evaluate(
            self.draft,
            self.held_out,
            self.teacher,
            self.embedding,
            Objective.of(settings, sampled=False),
            draft_tokens,
            settings.batch_tokens,
            between=self._end_if_asked,
        )
        expected = expected_acceptance_length(found.metrics["conditional"][:draft_tokens])
        acceptance = acceptance_figures(found.generations, draft_tokens)
        figures = {**found.metrics, "expected_acceptance_length": expected, **acceptance}
        # Every held-out sample has a root, so there are steps to divide by.
        length = acceptance["acceptance_length"] or 0.0
        if length > self.state.best_length:
            self.state.best_step, self.state.best_length = step, length
            if self.writes:
                self.checkpoints.save_best(step, self.draft.state_dict(), figures)
        del figures["per_source"]
        return {"kind": "evaluation", "step": step, "epoch": epoch, **figures}

    @contextmanager
    def _open_logs(self) -> Iterator[None]:
        """Open the logs and the trackers, in process 0."""
        if not self.writes:
            yield
            return
        settings = self.settings.model_dump()
        with trackers(self.machine, self.folder.name, self.state.step, settings) as track, self.logs.open(track):
            yield

    def _log(self, record: dict[str, Any], name: str = LOG) -> None:
        if self.writes:
            self.logs.append(record, name)

    def _save(self) -> None:
        tensors: dict[str, dict[str, Tensor]] = {
            "model": self.draft.state_dict(),
            "optimizer": self.optimizer.state(),
            "counters": {"streak": self.streak, "skipped": self.skipped, "tally": self.tally.reduce().sums},
        }
        if self.writes:
            self.checkpoints.save(self.state.step, tensors, asdict(self.state))
        else:
            # From here on, process 0 alone has the sums of all.
            self.tally.sums.zero_()
        self.saved_step = self.state.step
        parallel.barrier()

    def _resume(self) -> None:
        """Go back to the last checkpoint, if there is one; steps after it are logged again."""
        found = self.checkpoints.latest()
        if found:
            tensors, state = found
            self.state = TrainingState(**state)
            self.saved_step = self.state.step
            with torch.no_grad():
                for name, value in self.draft.state_dict().items():
                    value.copy_(tensors["model"][name])
            self.optimizer.load_state(tensors["optimizer"])
            counters = {name: value.to(self.device) for name, value in tensors["counters"].items()}
            self.streak, self.skipped = counters["streak"], counters["skipped"]
            if self.writes:
                self.tally.sums = counters["tally"]
        if self.writes:
            self.logs.cut(self.state.step, self.state.evaluated)
        parallel.barrier()

    @contextmanager
    def _noting_sigterm(self) -> Iterator[None]:
        """Only note SIGTERM: training saves and ends after its step, or after its row of an evaluation."""

        def note(_signal: int, _frame: FrameType | None) -> None:
            self.asked_to_end = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _end_if_asked(self) -> None:
        """Save and end if any process was asked to. All processes call this at the same points."""
        if not parallel.any_process(self.asked_to_end):
            return
        step = self.state.step
        if self.saved_step < step:
            self._save()
        if self.writes:
            say(f"asked to end: saved at step {step} of {len(self.steps)}; the next run resumes there")
        raise SystemExit(128 + signal.SIGTERM)

    def _finish(self) -> dict[str, Any]:
        """Write the artifact from the best weights and the logs."""
        counts = {
            "samples": len(self.loader.samples),
            "held_out_samples": len(self.held_out.samples),
            "steps": len(self.steps),
            "tokens": self.state.tokens,
            "supervised_tokens": self.state.supervised,
            "skipped_steps": int(self.skipped),
            "best_step": self.state.best_step,
            "acceptance_length": self.state.best_length,
        }
        if self.writes:
            assert self.state.best_step is not None
            weights, metrics = self.checkpoints.best(self.state.best_step)
            with atomic_write(self.folder / WEIGHTS) as temporary:
                save_file(weights, temporary)
            write_json(self.folder / NAME, self.draft.config.model_dump())
            write_json(self.folder / "metrics.json", {**metrics, **counts})
            self.logs.publish()
        return counts
