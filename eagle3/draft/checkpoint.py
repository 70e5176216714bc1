"""Checkpoints in a stage's work folder: written whole or not at all, rotated, refused when the recipe changed.

A checkpoint is a folder `.checkpoints/step-<n>`; the best weights so far lie in `.checkpoints/best-<n>`. All
randomness of training is a function of the seed, the epoch and the row, so the step number alone fixes the position
in the data and the state of every generator.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.draft import parallel
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json, sync, write_json

FOLDER = ".checkpoints"
KEPT = 2


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the stage's work folder.
        recipe: what must not change between a run and its continuation.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.folder = folder / FOLDER
        if parallel.rank() == 0:
            self.folder.mkdir(exist_ok=True)
            for left in self.folder.glob("tmp-*"):
                shutil.rmtree(left)
            self._check_recipe(recipe)
        parallel.barrier()

    def _check_recipe(self, recipe: Mapping[str, Any]) -> None:
        path = self.folder / "recipe.json"
        if not path.exists():
            write_json(path, recipe)
            return
        before = read_json(path)
        differing = sorted(key for key in before.keys() | recipe.keys() if before.get(key) != recipe.get(key))
        if differing:
            raise Eagle3Error(
                "a training run cannot continue: its settings or its data changed",
                where=self.folder.parent,
                found={key: recipe.get(key) for key in differing},
                expected={key: before.get(key) for key in differing},
                remedy="change them back, or use another work folder",
            )

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint: file name -> tensors, and JSON state whose `best_step` names the best weights.

        Checkpoints beyond the last two go, and best weights that none of those names.
        """
        self._write(self._path("step", step), tensors, state)
        paths = sorted(self.folder.glob("step-*"))
        for path in paths[:-KEPT]:
            shutil.rmtree(path)
        named = {read_json(path / "state.json")["best_step"] for path in paths[-KEPT:]}
        for path in self.folder.glob("best-*"):
            if path not in {self._path("best", best) for best in named if best is not None}:
                shutil.rmtree(path)

    def save_best(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Keep the best weights so far; they last from the next `save` that names them."""
        self._write(self._path("best", step), {"model": weights}, state)

    def latest(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """Return what the last `save` wrote, or None."""
        paths = sorted(self.folder.glob("step-*"))
        return _read(paths[-1]) if paths else None

    def best(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the best weights, kept at `step`, and their state."""
        tensors, state = _read(self._path("best", step))
        return tensors["model"], state

    def _path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{step:09d}"

    def _write(self, path: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        from safetensors.torch import save_file

        temporary = path.with_name(f"tmp-{path.name}")
        temporary.mkdir()
        for name, group in tensors.items():
            save_file({key: tensor.contiguous() for key, tensor in group.items()}, temporary / f"{name}.safetensors")
        write_json(temporary / "state.json", state)
        for file in temporary.iterdir():
            sync(file)
        # Only best weights that no checkpoint names yet can stand there, left by a killed run.
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        sync(path.parent)


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    from safetensors.torch import load_file

    tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return tensors, read_json(path / "state.json")
