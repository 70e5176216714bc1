"""Training as users run it: it learns, it can be killed at any moment, and it says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.draft import train
from eagle3.draft.model import load_draft
from eagle3.draft.run import LOG
from eagle3.draft.settings import DraftSettings
from eagle3.engines.settings import MachineSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records, write_records
from eagle3.hidden_states.reader import HiddenStateReader
from tests.draft.conftest import Inputs

SETTINGS: dict[str, Any] = {
    "unroll": 3,
    "epochs": 6,
    "batch_tokens": 96,
    "accumulate": 2,
    "learning_rate": 1e-2,
    "checkpoint_every": 5,
    "evaluate_every": 7,
    "log_every": 2,
    "sampled_unroll": True,
}


def make(inputs: Inputs, folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return train.make(
        DraftSettings(**(SETTINGS | changes)), MachineSettings(device="cpu", threads=1), **vars(inputs), folder=folder
    )


def artifact(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def log_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


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


@pytest.mark.parametrize(("sign", "after"), [(signal.SIGKILL, 9), (signal.SIGTERM, 4)])
def test_a_killed_run_continues_bit_for_bit(
    sign: signal.Signals, after: int, finished: tuple[Path, dict[str, Any]], inputs: Inputs, tmp_path: Path
) -> None:
    arguments = {
        key: [str(p) for p in value] if isinstance(value, list) else str(value) for key, value in vars(inputs).items()
    }
    command = [sys.executable, "-m", "tests.draft.test_train", json.dumps(arguments), str(tmp_path)]
    child = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = tmp_path / f".{LOG}"
    while child.poll() is None and not (log.exists() and len(log.read_bytes().splitlines()) >= after):
        time.sleep(0.005)
    os.kill(child.pid, sign)
    assert child.wait() != 0
    assert not (tmp_path / "model.safetensors").exists()
    if sign == signal.SIGTERM:
        assert len(list((tmp_path / ".checkpoints").glob("step-*"))) > 0
    make(inputs, tmp_path)
    assert artifact(tmp_path) == artifact(finished[0])


def test_two_processes_give_what_one_gives_with_accumulation(
    finished: tuple[Path, dict[str, Any]], inputs: Inputs, tmp_path: Path
) -> None:
    machine = MachineSettings(device="cpu", threads=1, gpus=2)
    counts = train.make(DraftSettings(**SETTINGS), machine, **vars(inputs), folder=tmp_path)
    assert {name: counts[name] for name in ("steps", "tokens", "supervised_tokens")} == {
        name: finished[1][name] for name in ("steps", "tokens", "supervised_tokens")
    }
    for ours, theirs in zip(log_of(tmp_path, "train"), log_of(finished[0], "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    first, second = (log_of(folder, "evaluation")[0] for folder in (tmp_path, finished[0]))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


def test_a_changed_recipe_is_refused_with_its_keys(inputs: Inputs, tmp_path: Path) -> None:
    make(inputs, tmp_path, epochs=1)
    with pytest.raises(Eagle3Error, match="settings or its data changed") as error:
        make(inputs, tmp_path, epochs=2)
    assert "{'draft.epochs': 2}" in str(error.value)


def test_non_finite_gradients_are_skipped_counted_and_end_the_run(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One spoiled sample is survived; with all spoiled the run stops and names samples."""
    spoiled = {next(iter(read_records(inputs.train)))["id"]}
    read = HiddenStateReader.read

    def spoil(self: Any, sample: str, start: int = 0, stop: int | None = None, *, aux: bool = True) -> Any:
        states = read(self, sample, start, stop, aux=aux)
        if sample in spoiled:
            states.aux[:1] = torch.nan
        return states

    monkeypatch.setattr(HiddenStateReader, "read", spoil)
    counts = make(inputs, tmp_path / "one", epochs=2)
    assert counts["skipped_steps"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in load_draft(tmp_path / "one").parameters())
    spoiled |= {record["id"] for record in read_records(inputs.train)}
    with pytest.raises(Eagle3Error, match=r"not finite in \d+ steps in a row") as error:
        make(inputs, tmp_path / "all", max_skipped=3)
    assert sum(name in str(error.value) for name in spoiled) > 1


def test_float8_is_refused_where_there_is_none(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no units for float8") as error:
        make(inputs, tmp_path, float8=True)
    assert "draft.float8" in str(error.value)


def test_a_gpu_that_is_named_is_the_one_that_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda:1", "cuda", "cpu"):
        assert train.choose_device(MachineSettings(device=name)) == torch.device(name)
    assert current == [torch.device("cuda:1")]


def test_hidden_states_of_other_tokens_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    records = list(read_records(inputs.train))
    records[3]["input_ids"][2] += 1
    write_records(tmp_path / "train.jsonl.zst", records)
    changed = Inputs(**(vars(inputs) | {"train": tmp_path / "train.jsonl.zst"}))
    with pytest.raises(Eagle3Error, match="belong to other tokens") as error:
        make(changed, tmp_path / "run", epochs=1)
    assert records[3]["id"] in str(error.value)


def test_samples_without_supervised_positions_are_counted_and_none_at_all_is_an_error(
    inputs: Inputs, tmp_path: Path
) -> None:
    records = list(read_records(inputs.train))
    for record in records[:5]:
        start = record["spans"][0][0]
        record["spans"] = [[start, start + 1]]
    write_records(tmp_path / "train.jsonl.zst", records)
    changed = Inputs(**(vars(inputs) | {"train": tmp_path / "train.jsonl.zst"}))
    assert make(changed, tmp_path / "some", epochs=1)["unsupervised_samples"] == 5
    write_records(tmp_path / "train.jsonl.zst", records[:5])
    with pytest.raises(Eagle3Error, match="no sample has a supervised position"):
        make(changed, tmp_path / "none", epochs=1)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    shards = [Path(path) for path in values.pop("hidden_states")]
    make(Inputs(**{key: Path(path) for key, path in values.items()}, hidden_states=shards), Path(sys.argv[2]))
