"""Training: from captured hidden states to a draft, resumable at any moment."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3.acceptance import summarise
from eagle3.console import progress
from eagle3.draft.checkpoint import Checkpoints
from eagle3.draft.config import NAME, draft_config
from eagle3.draft.evaluate import Evaluation, evaluate
from eagle3.draft.metrics import Tally, expected_acceptance_length
from eagle3.draft.model import WEIGHTS, Draft, prepare, unroll
from eagle3.draft.objective import Objective, Teacher, projected_loss
from eagle3.draft.optimizer import Optimizer, learning_rate
from eagle3.draft.packing import pack
from eagle3.draft.rows import Row
from eagle3.draft.samples import Rows, Sample, data_digest, read_samples
from eagle3.draft.settings import DraftSettings
from eagle3.draft.start import start
from eagle3.engines.settings import MachineSettings
from eagle3.errors import Eagle3Error
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.manifest import sha256
from eagle3.records import RecordLog, write_json
from eagle3.target import HeadWeights, Target, head_weights, load_target

LOG = ".log.jsonl"


def make(
    settings: DraftSettings,
    machine: MachineSettings,
    *,
    target: Path,
    train: Path,
    evaluation: Path,
    vocabulary: Path,
    hidden_states: Sequence[Path],
    folder: Path,
) -> dict[str, Any]:
    """Train a draft and keep the weights with the best simulated acceptance length.

    Writes `model.safetensors` (float32 masters, the engines' tensor names), `draft.json`, `log.jsonl`, `metrics.json`;
    on a GPU also `timing.jsonl`, the one file that differs between equal runs.

    Returns:
        counts for the summary.

    Raises:
        Eagle3Error: inputs do not fit each other; a changed recipe; gradients that stay non-finite.
    """
    torch.set_num_threads(machine.threads)
    pinned = load_target(target)
    reader = HiddenStateReader(hidden_states)
    tensors = load_file(vocabulary)
    config = draft_config(settings, pinned, len(tensors["d2t"]), reader.recipe.layer_ids[:-1])
    draft = Draft(config, tensors["d2t"], tensors["t2d"])
    samples, unsupervised = read_samples(train)
    held_out, _ = read_samples(evaluation)
    recipe = {
        "settings": settings.model_dump(),
        "target": pinned.revision,
        "vocabulary": sha256(vocabulary),
        "train": data_digest(samples),
        "evaluation": data_digest(held_out),
    }
    run = Run(
        settings, pinned, head_weights(pinned), draft, samples, held_out, reader, folder, recipe, choose_device(machine)
    )
    return run.train() | {"unsupervised_samples": unsupervised}


@dataclass(frozen=True)
class Step:
    """The rows of one optimiser step: sample indices, and the seed of the row's sampled unroll."""

    epoch: int
    rows: Sequence[tuple[list[int], tuple[int, ...]]]


class Run:
    """One training run in one work folder."""

    def __init__(
        self,
        settings: DraftSettings,
        target: Target,
        head: HeadWeights,
        draft: Draft,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        reader: HiddenStateReader,
        folder: Path,
        recipe: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.settings, self.folder, self.device = settings, folder, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        start(draft, settings, target, head)
        self.draft = draft.to(device)
        self.optimizer = Optimizer(self.draft.parameters(), settings)
        self.embedding = head.embedding.to(device, dtype)
        self.teacher = Teacher.of(head, draft.target_ids, device, dtype)
        decay = settings.decay if settings.sampled_unroll else None
        self.rows = Rows(samples, reader, settings.unroll, device, decay)
        self.held_out = Rows(held_out, reader, settings.unroll, device)
        self.objective = Objective.of(settings, sampled=settings.sampled_unroll)
        self.exact = Objective.of(settings, sampled=False)
        self.checkpoints = Checkpoints(folder, recipe)
        self.steps = plan(settings, [sample.context for sample in samples])
        self.tally = Tally(settings.unroll, device)
        self.streak = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.state: dict[str, Any] = {"step": 0, "tokens": 0, "supervised": 0, "best_step": None, "best": 0.0}
        self.recent: deque[tuple[str, ...]] = deque(maxlen=settings.max_skipped + settings.log_every)

    def train(self) -> dict[str, Any]:
        """Run what is left of the steps, write the artifact, and return its counts."""
        self._resume()
        first = self.state["step"]
        stream = self._stream(first)
        with (
            RecordLog(self.folder / LOG) as log,
            _Terminated() as terminated,
            progress(len(self.steps), "draft", "steps") as bar,
        ):
            bar.update(first)
            for number in range(first, len(self.steps)):
                self._step(number, stream, log)
                bar.update(1)
                if terminated:
                    self._save()
                    raise SystemExit(128 + signal.SIGTERM)
        return self._finish()

    def _step(self, number: int, stream: Iterator[Row], log: RecordLog) -> None:
        step, settings = self.steps[number], self.settings
        totals = self.rows.counts(index for members, _ in step.rows for index in members).tolist()
        ids: list[str] = []
        for _ in step.rows:
            row = next(stream)
            ids += row.ids
            self._accumulate(row.to(self.device), totals)
            self.state["tokens"] += len(row.positions)
            self.state["supervised"] += len(row.ranks)
        rate = learning_rate(settings, number, len(self.steps))
        norm, skipped = self.optimizer.step(rate)
        self.streak = (self.streak + skipped) * skipped
        self.skipped += skipped
        self.recent.append(tuple(ids))
        self.state["step"] = done = number + 1
        last = done == len(self.steps)
        if last or done % settings.log_every == 0:
            self._check_streak(done)
            log.append(self._record(step.epoch, rate, float(norm)))
        if last or done % settings.evaluate_every == 0:
            log.append(self._evaluate(step.epoch))
        if last or done % settings.checkpoint_every == 0:
            self._save()

    def _accumulate(self, row: Row, totals: Sequence[int]) -> None:
        """Add one row's gradients."""
        weights = prepare(self.draft, self.embedding.dtype)
        outputs = unroll(weights, row, self.embedding)
        loss, outcome = projected_loss(outputs, weights.lm_head, self.teacher, row, self.objective, totals)
        loss.backward()
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

    def _check_streak(self, step: int) -> None:
        streak = int(self.streak)
        if streak >= self.settings.max_skipped:
            ids = [name for names in list(self.recent)[-streak:] for name in names]
            raise Eagle3Error(
                f"the gradient was not finite in {streak} steps in a row",
                where=f"step {step}, samples {', '.join(ids[:20])}{' ...' if len(ids) > 20 else ''}",
                expected=f"at most {self.settings.max_skipped - 1} such steps in a row (draft.max_skipped)",
                remedy="lower draft.learning_rate, or look for damaged hidden states in these samples",
            )

    def _evaluate(self, epoch: int) -> dict[str, Any]:
        """Measure on the held-out split and keep the weights if they are the best so far."""
        settings = self.settings
        drafts = min(settings.evaluate_drafts, settings.unroll)
        found = evaluate(
            self.draft, self.held_out, self.teacher, self.embedding, self.exact, drafts, settings.batch_tokens
        )
        figures = _figures(found, drafts)
        step, length = self.state["step"], figures["acceptance_length"]
        if length > self.state["best"]:
            self.state |= {"best_step": step, "best": length}
            self.checkpoints.save_best(step, self.draft.state_dict(), figures)
        figures = {name: value for name, value in figures.items() if name != "per_source"}
        return {"kind": "evaluation", "step": step, "epoch": epoch, **figures}

    def _save(self) -> None:
        tensors = {
            "model": self.draft.state_dict(),
            "optimizer": self.optimizer.state(),
            "counters": {"streak": self.streak, "skipped": self.skipped, "tally": self.tally.sums},
        }
        self.checkpoints.save(self.state["step"], tensors, self.state)

    def _resume(self) -> None:
        """Go back to the last checkpoint, if there is one; what was logged after it is logged again."""
        found = self.checkpoints.latest()
        if found:
            tensors, self.state = found
            with torch.no_grad():
                for name, value in self.draft.state_dict().items():
                    value.copy_(tensors["model"][name])
            self.optimizer.load_state(tensors["optimizer"])
            counters = {name: value.to(self.device) for name, value in tensors["counters"].items()}
            self.streak, self.skipped, self.tally.sums = counters["streak"], counters["skipped"], counters["tally"]
        log = self.folder / LOG
        if log.exists():
            with RecordLog(log) as old:
                kept = [record for record in old.records if record["step"] <= self.state["step"]]
            log.unlink()
            with RecordLog(log) as new:
                new.append(*kept)

    def _stream(self, first: int) -> Iterator[Row]:
        return self.rows.stream(row for step in self.steps[first:] for row in step.rows)

    def _finish(self) -> dict[str, Any]:
        """Write the artifact from the best weights and the log."""
        weights, metrics = self.checkpoints.best(self.state["best_step"])
        save_file(weights, self.folder / f".{WEIGHTS}")
        (self.folder / f".{WEIGHTS}").replace(self.folder / WEIGHTS)
        write_json(self.folder / NAME, self.draft.config.model_dump())
        write_json(
            self.folder / "metrics.json", metrics | {"steps": len(self.steps), "skipped_steps": int(self.skipped)}
        )
        temporary = self.folder / ".log.final"
        temporary.write_bytes((self.folder / LOG).read_bytes())
        temporary.replace(self.folder / "log.jsonl")
        return {
            "samples": len(self.rows.samples),
            "held_out_samples": len(self.held_out.samples),
            "steps": len(self.steps),
            "tokens": self.state["tokens"],
            "supervised_tokens": self.state["supervised"],
            "skipped_steps": int(self.skipped),
            "best_step": self.state["best_step"],
            "acceptance_length": self.state["best"],
        }


def plan(settings: DraftSettings, lengths: Sequence[int]) -> list[Step]:
    """Return all steps of a run: every epoch packs the samples anew."""
    steps = []
    for epoch in range(settings.epochs):
        rows = pack(lengths, settings.batch_tokens, np.random.default_rng([settings.seed, epoch]))
        seeded = [(members, (settings.seed, epoch, index)) for index, members in enumerate(rows)]
        groups = range(0, len(seeded), settings.accumulate)
        steps += [Step(epoch, seeded[index : index + settings.accumulate]) for index in groups]
    return steps


def choose_device(machine: MachineSettings) -> torch.device:
    """Return the device that the settings name; `auto` prefers CUDA, then Apple's, then the CPU."""
    if machine.device != "auto":
        return torch.device(machine.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _figures(found: Evaluation, drafts: int) -> dict[str, Any]:
    expected = expected_acceptance_length(found.metrics["conditional"][:drafts])
    return {**found.metrics, "expected_acceptance_length": expected, **summarise(found.drafted, drafts)}


class _Terminated:
    """True once the process was asked to end (SIGTERM): the step in progress is finished and saved first."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> _Terminated:
        self.before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
