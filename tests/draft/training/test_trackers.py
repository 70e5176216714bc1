"""The log of a training run, as TensorBoard and Weights & Biases receive it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.training.trackers import scalars
from eagle3.draft.training.trainer import Trainer
from eagle3.errors import Eagle3Error
from eagle3.stages import draft as train
from tests.draft.conftest import Inputs

SETTINGS = DraftSettings(unroll=2, epochs=2, batch_tokens=128, log_every=2, evaluate_every=5)


def make(inputs: Inputs, folder: Path, **machine: Any) -> list[dict[str, Any]]:
    """Train, and return the log."""
    folder.mkdir(exist_ok=True)
    settings = MachineSettings(device="cpu", threads=1, checkpoint_every=3, **machine)
    train.make(SETTINGS, settings, **vars(inputs), folder=folder)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def points(log: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What a tracker must show of a log."""
    expected: dict[str, list[Any]] = {}
    for record in log:
        for tag, value in scalars(record["kind"], record).items():
            expected.setdefault(tag, []).append((record["step"], pytest.approx(value)))
    return expected


def test_what_is_shown_of_a_record() -> None:
    record = {"kind": "train", "step": 3, "loss": [0.5, 0.7, None], "grad_norm": 2.0, "sources": {"a": 1}}
    assert scalars("train", record) == {"train/loss/0": 0.5, "train/loss/1": 0.7, "train/grad_norm": 2.0}


def test_tensorboard_shows_the_log_of_a_run_that_was_stopped_and_continued(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    step = Trainer._step

    def stop(self: Trainer, number: int, stream: Any) -> None:
        step(self, number, stream)
        if number == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        make(inputs, tmp_path / "run", tensorboard=str(tmp_path / "board"))
    monkeypatch.undo()
    log = make(inputs, tmp_path / "run", tensorboard=str(tmp_path / "board"))
    shown = accumulator.EventAccumulator(str(tmp_path / "board" / "run"), size_guidance={"scalars": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}
    assert found == points(log)
    plain = make(inputs, tmp_path / "plain")
    assert plain == log


def test_wandb_receives_the_log(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    log = make(inputs, tmp_path / "run", wandb="drafts")
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-run.wandb")
    content = written.read_bytes()
    assert all(tag.encode() in content for tag in points(log))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(
    package: str, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Eagle3Error, match=rf"{package} is not installed(.|\n)*pip install"):
        make(inputs, tmp_path, **{package: str(tmp_path)})
