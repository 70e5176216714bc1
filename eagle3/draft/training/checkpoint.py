"""Checkpoints in a stage's work folder: written atomically, rotated, refused if the run's identity changed, and
removed with a message if damaged.

A checkpoint is a folder `.checkpoints/step-<n>`; the best weights so far are in `.checkpoints/best-<n>`. Each folder
has the digests of its files, since training would otherwise silently continue from a flipped byte. All randomness of
training is a function of the seed, the epoch and the row, so the step number alone fixes the position in the data and
the state of every generator.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.console import say
from eagle3.draft import parallel
from eagle3.errors import Eagle3Error
from eagle3.files.atomic import sync
from eagle3.files.hashing import sha256
from eagle3.files.records import read_json, write_json

FOLDER = ".checkpoints"
STATE, DIGESTS = "state.json", "digests.json"
KEPT = 2


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the stage's work folder.
        identity: what must not change between a run and its continuation.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / FOLDER
        if parallel.rank() == 0:
            self.folder.mkdir(exist_ok=True)
            for left in self.folder.glob("tmp-*"):
                shutil.rmtree(left)
            self._check_identity(identity)
            self._remove_damaged()
        parallel.barrier()

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        path = self.folder / "identity.json"
        if not path.exists():
            write_json(path, identity)
            return
        before = read_json(path)
        differing = sorted(key for key in before.keys() | identity.keys() if before.get(key) != identity.get(key))
        if differing:
            raise Eagle3Error(
                "cannot continue the training run: its settings or its data changed",
                where=self.folder.parent,
                found={key: identity.get(key) for key in differing},
                expected={key: before.get(key) for key in differing},
                remedy="restore them, or use another work folder",
            )

    def _remove_damaged(self) -> None:
        """Remove checkpoints whose files, or whose best weights, differ from what was written, and say so."""
        intact, damaged = [], False
        for path in sorted(self.folder.glob("step-*")):
            try:
                best = _check(path)["best_step"]
                if best is not None:
                    _check(self._path("best", best))
                intact.append(path)
            except (Eagle3Error, FileNotFoundError) as error:
                say(f"the checkpoint {path} is damaged and was removed: {str(error).splitlines()[0]}")
                shutil.rmtree(path)
                damaged = True
        if damaged:
            say(f"training resumes from {intact[-1].name}" if intact else "no checkpoint is left: training starts over")

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint: file name -> tensors, and JSON state whose `best_step` names the best weights.

        Removes all checkpoints except the last two, and best weights that neither of them names.
        """
        self._write(self._path("step", step), tensors, state)
        paths = sorted(self.folder.glob("step-*"))
        for path in paths[:-KEPT]:
            shutil.rmtree(path)
        named = {read_json(path / STATE)["best_step"] for path in paths[-KEPT:]}
        for path in self.folder.glob("best-*"):
            if path not in {self._path("best", best) for best in named if best is not None}:
                shutil.rmtree(path)

    def save_best(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write the best weights so far; the next `save` must name them, or it removes them."""
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
        temporary = path.with_name(f"tmp-{path.name}")
        temporary.mkdir()
        for name, group in tensors.items():
            save_file({key: tensor.contiguous() for key, tensor in group.items()}, temporary / f"{name}.safetensors")
        write_json(temporary / STATE, state)
        write_json(temporary / DIGESTS, {file.name: sha256(file) for file in temporary.iterdir()})
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        # Only best weights that no checkpoint names yet can be here, left by a killed run.
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        sync(path.parent)


def _check(path: Path) -> dict[str, Any]:
    """Check a checkpoint's files against their digests, and return its state.

    Raises:
        Eagle3Error, FileNotFoundError: a file is damaged or missing.
    """
    for name, digest in read_json(path / DIGESTS).items():
        if sha256(path / name) != digest:
            raise Eagle3Error(f"{name} differs from what was written", where=path)
    state: dict[str, Any] = read_json(path / STATE)
    return state


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    return {file.stem: load_file(file) for file in path.glob("*.safetensors")}, read_json(path / STATE)
