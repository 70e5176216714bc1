"""Training as users run it: it learns, it can be killed at any moment, and it says what is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft import parallel
from eagle3.draft.data.loader import read_samples
from eagle3.draft.data.packing import pack
from eagle3.draft.model.network import load_draft
from eagle3.draft.training import evaluation as evaluate
from eagle3.draft.training.logs import LOG
from eagle3.draft.training.metrics import accepted_draft_tokens
from eagle3.draft.training.schedule import plan
from eagle3.draft.training.trainer import Trainer
from eagle3.errors import Eagle3Error
from eagle3.files.records import RecordLog, read_records, write_records
from eagle3.gpus import choose_device
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.stages import draft as train
from tests.draft.conftest import Inputs

SETTINGS: dict[str, Any] = {
    "unroll": 3,
    "epochs": 6,
    "batch_tokens": 96,
    "accumulate": 2,
    "learning_rate": 1e-2,
    "evaluate_every": 7,
    "log_every": 2,
    "sampled_unroll": True,
}

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def make(inputs: Inputs, folder: Path, *, checkpoint_every: int = 5, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    machine = MachineSettings(device="cpu", threads=1, checkpoint_every=checkpoint_every)
    return train.make(DraftSettings(**(SETTINGS | changes)), machine, **vars(inputs), folder=folder)


def artifact(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def log_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / ".checkpoints").glob("step-*"))


def with_records(inputs: Inputs, split: str, records: list[dict[str, Any]], folder: Path) -> Inputs:
    """The same inputs except for one split."""
    path = folder / f"{split}.jsonl.zst"
    write_records(path, records)
    return Inputs(**(vars(inputs) | {split: path}))


@pytest.fixture(scope="module")
def finished(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One undisturbed run."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, make(inputs, folder)


def test_the_draft_learns_and_the_best_weights_are_kept(finished: tuple[Path, dict[str, Any]], inputs: Inputs) -> None:
    folder, counts = finished
    assert sorted(artifact(folder)) == ["draft.json", "log.jsonl", "metrics.json", "model.safetensors"]
    losses = [record["loss"][0] for record in log_of(folder, "train")]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    evaluations = {record["step"]: record["acceptance_length"] for record in log_of(folder, "evaluation")}
    assert counts["acceptance_length"] == evaluations[counts["best_step"]] == max(evaluations.values())
    assert counts["tokens"] == 6 * sum(record["spans"][-1][1] - 2 for record in read_records(inputs.train))
    draft = load_draft(folder)
    assert all(tensor.dtype == torch.float32 for tensor in draft.parameters())
    vocabulary = load_file(inputs.vocabulary)
    assert torch.equal(draft.d2t, vocabulary["d2t"])
    assert torch.equal(draft.t2d, vocabulary["t2d"])


def test_two_runs_give_the_same_bytes(finished: tuple[Path, dict[str, Any]], inputs: Inputs, tmp_path: Path) -> None:
    make(inputs, tmp_path)
    assert artifact(tmp_path) == artifact(finished[0])


def started(inputs: Inputs, folder: Path, *arguments: int) -> subprocess.Popen[bytes]:
    """Train in a process of its own; see the end of this file for the arguments."""
    paths = {
        key: [str(p) for p in value] if isinstance(value, list) else str(value) for key, value in vars(inputs).items()
    }
    command = [sys.executable, "-m", "tests.stages.test_draft", json.dumps(paths), str(folder), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.parametrize(("sign", "after", "every"), [(signal.SIGKILL, 9, 5), (signal.SIGTERM, 4, 1000)])
def test_a_killed_run_continues_bit_for_bit(
    sign: signal.Signals, after: int, every: int, finished: tuple[Path, dict[str, Any]], inputs: Inputs, tmp_path: Path
) -> None:
    """It resumes from the last checkpoint. Asked to end, a run writes one at its current step, whatever the interval.

    The interval may differ in the continuation: it does not affect the draft.
    """
    child = started(inputs, tmp_path, every)
    log = tmp_path / f".{LOG}"
    while child.poll() is None and not (log.exists() and len(log.read_bytes().splitlines()) >= after):
        time.sleep(0.005)
    os.kill(child.pid, sign)
    assert child.wait() == (-sign if sign == signal.SIGKILL else 128 + sign)
    assert not (tmp_path / "model.safetensors").exists()
    if sign == signal.SIGTERM:
        (saved,) = checkpoints(tmp_path)
        logged = json.loads(log.read_bytes().splitlines()[-1])["step"]
        assert logged <= int(saved.name.removeprefix("step-")) < logged + SETTINGS["log_every"]
    make(inputs, tmp_path, checkpoint_every=3)
    assert artifact(tmp_path) == artifact(finished[0])


def ask_to_end_at(row: int) -> None:
    """Send this process SIGTERM at that row of its evaluations; it must not begin another one."""
    numbers = itertools.count(1)

    def asked(*arguments: Any) -> Any:
        number = next(numbers)
        assert number <= row, "it continues the evaluation"
        if number == row:
            os.kill(os.getpid(), signal.SIGTERM)
        return accepted_draft_tokens(*arguments)

    pytest.MonkeyPatch().setattr(evaluate, "accepted_draft_tokens", asked)


@pytest.mark.parametrize("which", [1, -1], ids=["second", "last"])
def test_a_run_that_is_asked_to_end_in_an_evaluation_does_not_finish_it(
    which: int,
    finished: tuple[Path, dict[str, Any]],
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next start does, with the same result; also if it is asked to end there again, or killed right after it."""
    steps = [record["step"] for record in log_of(finished[0], "evaluation")]
    context = [sample.context for sample in read_samples(inputs.evaluation)[0]]
    rows = len(pack(context, SETTINGS["batch_tokens"], np.random.default_rng(0)))
    assert rows > 2
    for row in (rows * steps.index(steps[which]) + 1, 1):
        assert started(inputs, tmp_path, 1000, row).wait() == 128 + signal.SIGTERM
        (saved,) = checkpoints(tmp_path)
        assert int(saved.name.removeprefix("step-")) == steps[which]
        logged = [json.loads(line) for line in (tmp_path / f".{LOG}").read_text().splitlines()]
        assert [record["step"] for record in logged if record["kind"] == "evaluation"] == steps[
            : steps.index(steps[which])
        ]

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_step", killed)
    monkeypatch.setattr(Trainer, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        make(inputs, tmp_path)
    monkeypatch.undo()
    make(inputs, tmp_path)
    assert artifact(tmp_path) == artifact(finished[0])


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_run_with_damaged_checkpoints_ends_as_an_undisturbed_one(
    damaged: int,
    finished: tuple[Path, dict[str, Any]],
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The newest of two, or both."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    for name in artifact(folder):
        (folder / name).unlink()
    paths = checkpoints(folder)
    assert len(paths) == 2
    for path in paths[-damaged:]:
        with (path / "optimizer.safetensors").open("ab") as file:
            file.truncate(1000)
    make(inputs, folder)
    assert artifact(folder) == artifact(finished[0])
    said = capsys.readouterr().err
    assert [str(path) in said for path in paths] == [damaged == 2, True]
    assert ("starts over" if damaged == 2 else f"resumes from {paths[0].name}") in said


def test_a_step_weighs_positions_alike_however_they_are_packed(inputs: Inputs, tmp_path: Path) -> None:
    """One row holds a long and a short answer, or each has a row of its own in the same step."""
    records = list(read_records(inputs.train))[:2]
    start = records[1]["spans"][0][0]
    records[1]["spans"] = [[start, start + 4]]
    two = with_records(inputs, "train", records, tmp_path)
    plain = {"epochs": 1, "log_every": 1, "sampled_unroll": False}
    make(two, tmp_path / "together", **plain, batch_tokens=96, accumulate=1)
    make(two, tmp_path / "apart", **plain, batch_tokens=16, accumulate=2)
    (together,), (apart,) = (log_of(tmp_path / name, "train") for name in ("together", "apart"))
    assert apart["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-4)
    assert apart["loss"] == pytest.approx(together["loss"], rel=1e-5)


TWO = MachineSettings(device="cpu", threads=1, gpus=2, checkpoint_every=5)


@pytest.fixture(scope="module")
def finished_by_two(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same by two processes."""
    folder = tmp_path_factory.mktemp("finished-by-two")
    return folder, train.make(DraftSettings(**SETTINGS), TWO, **vars(inputs), folder=folder)


def test_two_processes_give_what_one_gives_with_accumulation(
    finished: tuple[Path, dict[str, Any]], finished_by_two: tuple[Path, dict[str, Any]]
) -> None:
    folder, counts = finished_by_two
    assert {name: counts[name] for name in ("steps", "tokens", "supervised_tokens")} == {
        name: finished[1][name] for name in ("steps", "tokens", "supervised_tokens")
    }
    for ours, theirs in zip(log_of(folder, "train"), log_of(finished[0], "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    first, second = (log_of(folder, "evaluation")[0] for folder in (folder, finished[0]))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


def train_and_end(inputs: Inputs, folder: Path) -> None:
    """One of two processes; the second one is asked to end at the first row of its second evaluation."""
    if parallel.rank() == 1:
        ask_to_end_at(2)
    train._train(DraftSettings(**SETTINGS), TWO, **vars(inputs), folder=folder)


def test_if_one_of_two_processes_is_asked_to_end_in_an_evaluation_both_do(
    finished_by_two: tuple[Path, dict[str, Any]], inputs: Inputs, tmp_path: Path
) -> None:
    """The first process has a row more."""
    with pytest.raises(SystemExit) as ended:
        parallel.launch(2, functools.partial(train_and_end, inputs, tmp_path))
    assert ended.value.code == 128 + signal.SIGTERM
    second = log_of(finished_by_two[0], "evaluation")[1]["step"]
    assert int(checkpoints(tmp_path)[-1].name.removeprefix("step-")) == second
    train.make(DraftSettings(**SETTINGS), TWO, **vars(inputs), folder=tmp_path)
    assert artifact(tmp_path) == artifact(finished_by_two[0])


def test_a_changed_identity_is_refused_with_its_keys(inputs: Inputs, tmp_path: Path) -> None:
    make(inputs, tmp_path, epochs=1)
    with pytest.raises(Eagle3Error, match="settings or its data changed") as error:
        make(inputs, tmp_path, epochs=2)
    assert "{'draft.epochs': 2}" in str(error.value)


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_changed_data_are_refused(split: str, inputs: Inputs, tmp_path: Path) -> None:
    make(inputs, tmp_path / "run", epochs=1)
    fewer = with_records(inputs, split, list(read_records(getattr(inputs, split)))[:-1], tmp_path)
    with pytest.raises(Eagle3Error, match="settings or its data changed") as error:
        make(fewer, tmp_path / "run", epochs=1)
    assert f"{{'{split}': " in str(error.value)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Samples whose hidden states are read as NaN."""
    names: set[str] = set()
    read = HiddenStateReader.read

    def spoil(self: Any, sample: str, start: int = 0, stop: int | None = None, *, aux: bool = True) -> Any:
        states = read(self, sample, start, stop, aux=aux)
        if sample in names:
            states.aux[:1] = torch.nan
        return states

    monkeypatch.setattr(HiddenStateReader, "read", spoil)
    return names


def test_non_finite_gradients_are_skipped_counted_and_end_the_run(
    inputs: Inputs, tmp_path: Path, spoiled: set[str]
) -> None:
    """A run survives one spoiled sample; if all are spoiled, it stops and names samples."""
    spoiled.add(next(iter(read_records(inputs.train)))["id"])
    counts = make(inputs, tmp_path / "one", epochs=2)
    assert counts["skipped_steps"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in load_draft(tmp_path / "one").parameters())
    spoiled |= {record["id"] for record in read_records(inputs.train)}
    with pytest.raises(Eagle3Error, match=r"not finite in \d+ steps in a row") as error:
        make(inputs, tmp_path / "all", max_skipped=3)
    assert sum(name in str(error.value) for name in spoiled) > 1


def test_only_skipped_steps_in_a_row_end_the_run(inputs: Inputs, tmp_path: Path, spoiled: set[str]) -> None:
    """Every sample is a step: first every other one is spoiled, then a few in a row."""
    changes = {"epochs": 1, "batch_tokens": 16, "accumulate": 1, "log_every": 1, "max_skipped": 3}
    samples = read_samples(inputs.train)[0]
    steps = plan(DraftSettings(**(SETTINGS | changes)), [sample.context for sample in samples])
    in_order = [samples[step.members[0]].id for step in steps]
    assert sorted(in_order) == sorted(sample.id for sample in samples)
    spoiled |= set(in_order[::2])
    assert make(inputs, tmp_path / "each other", **changes)["skipped_steps"] == 16
    spoiled.clear()
    spoiled |= {*in_order[4:6], *in_order[9:12]}
    with pytest.raises(Eagle3Error, match="not finite in 3 steps in a row") as error:
        make(inputs, tmp_path / "in a row", **changes)
    assert all(name in str(error.value) for name in in_order[9:12])


def test_float8_is_refused_where_there_is_none(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="does not support float8") as error:
        make(inputs, tmp_path, float8=True)
    assert "draft.float8" in str(error.value)


def test_a_gpu_that_is_named_is_the_one_that_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda:1", "cuda", "cpu"):
        assert choose_device(name) == torch.device(name)
    assert current == [torch.device("cuda:1")]


def test_hidden_states_of_other_tokens_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    records = list(read_records(inputs.train))
    records[3]["input_ids"][2] += 1
    changed = with_records(inputs, "train", records, tmp_path)
    with pytest.raises(Eagle3Error, match="captured from other tokens") as error:
        make(changed, tmp_path / "run", epochs=1)
    assert records[3]["id"] in str(error.value)


def test_samples_without_supervised_positions_are_counted_and_none_at_all_is_an_error(
    inputs: Inputs, tmp_path: Path
) -> None:
    records = list(read_records(inputs.train))
    for record in records[:5]:
        start = record["spans"][0][0]
        record["spans"] = [[start, start + 1]]
    changed = with_records(inputs, "train", records, tmp_path)
    assert make(changed, tmp_path / "some", epochs=1)["unsupervised_samples"] == 5
    changed = with_records(inputs, "train", records[:5], tmp_path)
    with pytest.raises(Eagle3Error, match="no sample has a supervised position"):
        make(changed, tmp_path / "none", epochs=1)


def test_the_speed_of_a_training_is_shown_by_medians(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RecordLog(tmp_path / "timing.jsonl") as log:
        log.append(*({"step": step, "tokens_per_second": rate} for step, rate in enumerate((900.0, 31234.5, 40000.0))))
    train.show_speed(tmp_path / "timing.jsonl")
    shown = capsys.readouterr().err
    assert "tokens per second" in shown
    assert "31,230" in shown


if __name__ == "__main__":
    # Inputs, folder, steps between checkpoints and, if given, the row of its evaluations at which it is asked to end.
    values = json.loads(sys.argv[1])
    shards = [Path(path) for path in values.pop("hidden_states")]
    given = Inputs(**{key: Path(path) for key, path in values.items()}, hidden_states=shards)
    if len(sys.argv) > 4:
        ask_to_end_at(int(sys.argv[4]))
    make(given, Path(sys.argv[2]), checkpoint_every=int(sys.argv[3]))
