"""Checkpoints: only a few are kept, and a damaged one is named and skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.draft.training.checkpoint import FOLDER, KEPT, Checkpoints


def filled(folder: Path, steps: int) -> Checkpoints:
    """Save at every step; the weights are the best ones at every even step."""
    kept = Checkpoints(folder, {})
    for step in range(1, steps + 1):
        tensors = {"w": torch.full((8,), float(step))}
        if step % 2 == 0:
            kept.save_best(step, tensors, {"figure": step})
        best = step - step % 2 or None
        kept.save(step, {"model": tensors, "optimizer": tensors}, {"step": step, "best_step": best})
    return kept


def names(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).glob(f"{kind}-*"))


def test_the_last_checkpoints_and_the_best_weights_they_name_are_kept(tmp_path: Path) -> None:
    kept = filled(tmp_path, 7)
    assert names(tmp_path, "step") == [f"step-{step:09d}" for step in range(8 - KEPT, 8)]
    assert names(tmp_path, "best") == ["best-000000006"]
    found = kept.latest()
    assert found is not None
    assert found[1] == {"step": 7, "best_step": 6}
    assert kept.best(6)[0]["w"].tolist() == [6] * 8


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "digests.json"])
@pytest.mark.parametrize("length", [None, 0, 5, 20])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    file: str, length: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file of it, missing or cut to a length."""
    filled(tmp_path, 5)
    path = tmp_path / FOLDER / "step-000000005" / file
    if length is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: min(length, path.stat().st_size - 3)])
    kept = Checkpoints(tmp_path, {})
    found = kept.latest()
    assert found is not None
    assert found[1] == {"step": 4, "best_step": 4}
    assert found[0]["model"]["w"].tolist() == [4] * 8
    said = capsys.readouterr().err
    assert f"{path.parent} is damaged" in said
    assert "resumes from step-000000004" in said
    kept.save(5, found[0], found[1])
    assert names(tmp_path, "step") == ["step-000000004", "step-000000005"]


@pytest.mark.parametrize("file", ["step-000000005/model", "step-000000005/optimizer", "best-000000004/model"])
def test_one_bit_of_a_tensor_is_damage(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file still loads; both checkpoints here name the same best weights."""
    filled(tmp_path, 5)
    path = tmp_path / FOLDER / f"{file}.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    found = Checkpoints(tmp_path, {}).latest()
    assert (found and found[1]["step"]) == (4 if file.startswith("step") else None)
    assert f"{path.name} differs from what was written" in capsys.readouterr().err


def test_without_the_best_weights_that_it_names_a_checkpoint_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, 6)
    (tmp_path / FOLDER / "best-000000006" / "model.safetensors").unlink()
    found = Checkpoints(tmp_path, {}).latest()
    assert found is not None
    assert found[1]["step"] == 5
    (tmp_path / FOLDER / "best-000000004" / "model.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert Checkpoints(tmp_path, {}).latest() is None
    assert "starts over" in capsys.readouterr().err


def test_intact_checkpoints_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, 3)
    Checkpoints(tmp_path, {})
    assert capsys.readouterr().err == ""
