"""One training run: its steps, log, evaluations and checkpoints.

With several processes every one runs the same steps on its share of the rows; sums are exchanged where they are
needed, and process 0 writes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.acceptance.figures import summarise
from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import Progress, say
from eagle3.draft.data.loader import Rows, Sample
from eagle3.draft.data.packing import pack
from eagle3.draft.data.row import Row
from eagle3.draft.data.teacher import Summariser
from eagle3.draft.model.config import NAME, WEIGHTS
from eagle3.draft.model.network import Draft
from eagle3.draft.ops.dispatch import pass_dtype
from eagle3.draft.training import parallel
from eagle3.draft.training.checkpoint import Checkpoints
from eagle3.draft.training.evaluation import Evaluation, evaluate
from eagle3.draft.training.metrics import Tally, expected_acceptance_length
from eagle3.draft.training.optimizer import Optimizer, learning_rate
from eagle3.draft.training.timing import Timing
from eagle3.draft.training.trackers import trackers
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import Weights, prepare
from eagle3.errors import Eagle3Error
from eagle3.files.atomic import atomic_write
from eagle3.files.records import RecordLog, write_json
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.weights import HeadWeights

LOG, TIMING = "log.jsonl", "timing.jsonl"


@dataclass(frozen=True)
class Step:
    """The rows of one optimiser step: sample indices, and the seed of the row's sampled unroll."""

    epoch: int
    rows: Sequence[tuple[list[int], tuple[int, ...]]]

    @property
    def members(self) -> list[int]:
        """All samples of the step."""
        return [index for members, _ in self.rows for index in members]


def plan(settings: DraftSettings, lengths: Sequence[int]) -> list[Step]:
    """Return all steps of a run: every epoch packs the samples anew."""
    steps = []
    for epoch in range(settings.epochs):
        rows = pack(lengths, settings.batch_tokens, np.random.default_rng([settings.seed, epoch]))
        seeded = [(members, (settings.seed, epoch, index)) for index, members in enumerate(rows)]
        groups = range(0, len(seeded), settings.accumulate)
        steps += [Step(epoch, seeded[index : index + settings.accumulate]) for index in groups]
    return steps


class Run:
    """A training run in one work folder, from its last checkpoint to its artifact."""

    def __init__(
        self,
        settings: DraftSettings,
        draft: Draft,
        head: HeadWeights,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        reader: HiddenStateReader,
        *,
        machine: MachineSettings,
        folder: Path,
        recipe: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Take over `draft` with its first weights; `recipe` is what must not change before the run is finished."""
        self.settings, self.machine, self.folder, self.device = settings, machine, folder, device
        self.recipe = recipe
        dtype = pass_dtype(device)
        self.draft = draft.to(device)
        self.optimizer = Optimizer(self.draft.named_parameters(), settings)
        self.embedding = head.embedding.to(device, dtype)
        self.teacher = Teacher.of(head, draft.target_ids, device, dtype)
        decay = settings.decay if settings.sampled_unroll else None
        self.rows = Rows(samples, reader, settings.unroll, device, decay)
        self.held_out = Rows(held_out, reader, settings.unroll, device)
        self.objective = Objective.of(settings, sampled=settings.sampled_unroll)
        self.writes = parallel.rank() == 0
        self.checkpoints = Checkpoints(folder, recipe)
        self.steps = plan(settings, [sample.context for sample in samples])
        self.tally = Tally(settings.unroll, device)
        # Steps in a row that were skipped, and the most of them since the last look.
        self.streak = torch.zeros((), device=device)
        self.longest = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.timing = Timing(draft.config, device) if device.type == "cuda" else None
        self.state: dict[str, Any] = {
            "step": 0,
            "evaluated": 0,
            "tokens": 0,
            "supervised": 0,
            "best_step": None,
            "best": 0.0,
        }
        self.saved = 0
        self.terminated = _Terminated()

    def train(self, summariser: Summariser) -> dict[str, Any]:
        """Run what is left of the steps, write the artifact, and return its counts."""
        for name, rows in (("train", self.rows), ("evaluation", self.held_out)):
            key = " ".join(str(self.recipe[part]) for part in ("target", "vocabulary", name))
            rows.summarise(summariser, self.folder / f".summaries-{name}", key)
        # The target's whole head takes memory, and nobody reads it any more.
        del summariser
        self._resume()
        first = self.state["step"]
        stream = self._stream(first)
        total = sum(sample.context for sample in self.rows.samples) * self.settings.epochs
        bar = Progress(total if self.writes else 0, "draft", "tokens")
        with self.terminated, bar, ExitStack() as stack:
            names = (LOG, TIMING) if self.timing else (LOG,)
            self.logs = {name: stack.enter_context(RecordLog(self._scratch(name))) for name in names if self.writes}
            # Process 0 tracks; the others have no trackers.
            machine = self.machine if self.writes else MachineSettings()
            shown = self.settings.model_dump()
            self.track = stack.enter_context(trackers(machine, self.folder.name, first, shown))
            bar.update(self.state["tokens"])
            if self.timing is not None:
                self.timing.restart()
            # A run that was asked to end in an evaluation has left it to this one.
            self._evaluate_when_due()
            for number in range(first, len(self.steps)):
                before = self.state["tokens"]
                self._step(number, stream)
                bar.update(self.state["tokens"] - before)
                self._evaluate_when_due()
                if self._due(self.machine.checkpoint_every):
                    self._save()
                # Processes ask each other only where they wait for each other anyway.
                if parallel.world() == 1 or self._due(self.settings.log_every):
                    self._end_if_asked()
        return self._finish()

    def _step(self, number: int, stream: Iterator[Row]) -> None:
        step, settings = self.steps[number], self.settings
        totals = self.rows.counts(step.members).tolist()
        weights = prepare(self.draft, self.embedding.dtype, float8=self.settings.float8)
        for _ in self._share(step):
            self._accumulate(weights, self._next(stream), totals)
        rate = learning_rate(settings, number, len(self.steps))
        norm, skipped = self.optimizer.step(rate)
        self.streak = (self.streak + skipped) * skipped
        self.longest = torch.maximum(self.longest, self.streak)
        self.skipped += skipped
        done = number + 1
        self.state["step"] = done
        self.state["tokens"] += sum(self.rows.samples[index].context for index in step.members)
        self.state["supervised"] += totals[0]
        if self._due(settings.log_every):
            self._check_streak()
            self._log(self._record(step.epoch, rate, float(norm)))
            if self.timing is not None:
                self._log(self.timing.read(done), TIMING)

    def _due(self, every: int) -> bool:
        step: int = self.state["step"]
        return step % every == 0 or step == len(self.steps)

    def _next(self, stream: Iterator[Row]) -> Row:
        asked = time.perf_counter()
        row = next(stream)
        if self.timing is not None:
            self.timing.wait(time.perf_counter() - asked)
            self.timing.add(row)
        return row.to(self.device)

    def _accumulate(self, weights: Weights, row: Row, totals: Sequence[int]) -> None:
        """Add one row's gradients."""
        hidden = unroll(weights, row, self.embedding)
        outcome = projected_loss(hidden, weights.lm_head, self.teacher, row, self.objective, totals)
        hidden.backward(outcome.gradient)
        self.tally.add(row, outcome)

    def _record(self, epoch: int, rate: float, norm: float) -> dict[str, Any]:
        return {
            "kind": "train",
            "step": self.state["step"],
            "epoch": epoch,
            "learning_rate": rate,
            "grad_norm": norm,
            "skipped_steps": int(self.skipped),
            "tokens": self.state["tokens"],
            "supervised_tokens": self.state["supervised"],
            **self.tally.reduce().read(),
        }

    def _check_streak(self) -> None:
        longest, step = int(self.longest), self.state["step"]
        self.longest = self.streak.clone()
        if longest >= self.settings.max_skipped:
            first = max(step - max(longest, self.settings.log_every), 0)
            members = [index for step in self.steps[first:step] for index in step.members]
            ids = [self.rows.samples[index].id for index in members]
            raise Eagle3Error(
                f"the gradient was not finite in {longest} steps in a row, or far longer than usual",
                where=f"steps {first + 1} to {step}, samples {', '.join(ids[:200])}{' ...' if len(ids) > 200 else ''}",
                expected=f"at most {self.settings.max_skipped - 1} such steps in a row (draft.max_skipped)",
                remedy="lower draft.learning_rate, or look for damaged hidden states in these samples",
            )

    def _evaluate_when_due(self) -> None:
        step: int = self.state["step"]
        if self.state["evaluated"] < step and self._due(self.settings.evaluate_every):
            record = self._evaluate(self.steps[step - 1].epoch)
            self.state["evaluated"] = step
            self._log(record)

    def _evaluate(self, epoch: int) -> dict[str, Any]:
        """Measure on the held-out split and keep the weights if they are the best so far."""
        settings = self.settings
        drafts = min(settings.evaluate_drafts, settings.unroll)
        exact = Objective.of(settings, sampled=False)
        found = evaluate(
            self.draft,
            self.held_out,
            self.teacher,
            self.embedding,
            exact,
            drafts,
            settings.batch_tokens,
            between=self._end_if_asked,
        )
        figures = _figures(found, drafts)
        step, length = self.state["step"], figures["acceptance_length"]
        if length > self.state["best"]:
            self.state |= {"best_step": step, "best": length}
            if self.writes:
                self.checkpoints.save_best(step, self.draft.state_dict(), figures)
        figures = {name: value for name, value in figures.items() if name != "per_source"}
        return {"kind": "evaluation", "step": step, "epoch": epoch, **figures}

    def _log(self, record: dict[str, Any], name: str = LOG) -> None:
        if self.writes:
            self.logs[name].append(record)
            self.track(record.get("kind", "timing"), record)

    def _save(self) -> None:
        tensors: dict[str, dict[str, Tensor]] = {
            "model": self.draft.state_dict(),
            "optimizer": self.optimizer.state(),
            "counters": {"streak": self.streak, "skipped": self.skipped, "tally": self.tally.reduce().sums},
        }
        if self.writes:
            self.checkpoints.save(self.state["step"], tensors, self.state)
        else:
            # The sums of all processes go on in process 0 alone.
            self.tally.sums.zero_()
        self.saved = self.state["step"]
        parallel.barrier()

    def _resume(self) -> None:
        """Go back to the last checkpoint, if there is one; what was logged after it is logged again."""
        found = self.checkpoints.latest()
        if found:
            tensors, self.state = found
            self.saved = self.state["step"]
            with torch.no_grad():
                for name, value in self.draft.state_dict().items():
                    value.copy_(tensors["model"][name])
            self.optimizer.load_state(tensors["optimizer"])
            counters = {name: value.to(self.device) for name, value in tensors["counters"].items()}
            self.streak, self.skipped = counters["streak"], counters["skipped"]
            if self.writes:
                self.tally.sums = counters["tally"]
        for name in (LOG, TIMING):
            if self.writes and self._scratch(name).exists():
                _shorten(self._scratch(name), self.state)
        parallel.barrier()

    def _stream(self, first: int) -> Iterator[Row]:
        return self.rows.stream(row for step in self.steps[first:] for row in self._share(step))

    def _share(self, step: Step) -> Sequence[tuple[list[int], tuple[int, ...]]]:
        return step.rows[parallel.rank() :: parallel.world()]

    def _end_if_asked(self) -> None:
        """Save and end if any process was asked to. All processes call this at the same places."""
        if not parallel.any_process(self.terminated.asked):
            return
        step = self.state["step"]
        if self.saved < step:
            self._save()
        if self.writes:
            say(f"asked to end: saved at step {step} of {len(self.steps)}; another start goes on")
        raise SystemExit(128 + signal.SIGTERM)

    def _finish(self) -> dict[str, Any]:
        """Write the artifact from the best weights and the log."""
        counts = {
            "samples": len(self.rows.samples),
            "held_out_samples": len(self.held_out.samples),
            "steps": len(self.steps),
            "tokens": self.state["tokens"],
            "supervised_tokens": self.state["supervised"],
            "skipped_steps": int(self.skipped),
            "best_step": self.state["best_step"],
            "acceptance_length": self.state["best"],
        }
        if self.writes:
            weights, metrics = self.checkpoints.best(self.state["best_step"])
            with atomic_write(self.folder / WEIGHTS) as temporary:
                save_file(weights, temporary)
            write_json(self.folder / NAME, self.draft.config.model_dump())
            write_json(self.folder / "metrics.json", {**metrics, **counts})
            for name in self.logs:
                with atomic_write(self.folder / name) as temporary:
                    temporary.write_bytes(self._scratch(name).read_bytes())
        return counts

    def _scratch(self, log: str) -> Path:
        return self.folder / f".{log}"


def _figures(found: Evaluation, drafts: int) -> dict[str, Any]:
    expected = expected_acceptance_length(found.metrics["conditional"][:drafts])
    return {**found.metrics, "expected_acceptance_length": expected, **summarise(found.drafted, drafts)}


def _shorten(log: Path, state: dict[str, Any]) -> None:
    """Drop the lines of what came after a checkpoint."""
    reached = {"evaluation": state["evaluated"]}
    with RecordLog(log) as old:
        kept = [
            record for record in old.records if record["step"] <= reached.get(record.get("kind", ""), state["step"])
        ]
    log.unlink()
    with RecordLog(log) as new:
        new.append(*kept)


class _Terminated:
    """`asked` is true once the process was asked to end (SIGTERM): after its step, or its row of an evaluation."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Terminated:
        self.before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
