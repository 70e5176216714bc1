"""What the store holds that no run refers to. Nothing is deleted unless the user says so."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3.artifacts import manifest
from eagle3.artifacts.store import Store


@dataclass(frozen=True)
class Unused:
    """A folder that no run under `results/` refers to."""

    path: Path
    kind: str
    """`artifact`: finished, of an earlier generation; `work`: begun and never finished."""
    bytes: int


def unused(store: Store) -> list[Unused]:
    """List finished artifacts that no run refers to, and abandoned work, largest first.

    Work folders that a running job holds are not listed.
    """
    used = {
        (found.stage, found.key)
        for run in store.results.glob("*")
        if run.is_dir() and not run.name.startswith(".")
        for found in (manifest.read(path.parent) for path in run.rglob(manifest.NAME))
    }
    rows = [
        Unused(entry, "artifact", _size(entry))
        for entry in store.entries.glob("*/*")
        if (entry.parent.name, entry.name) not in used
    ]
    rows += [Unused(work, "work", _size(work)) for work in store.work.glob("*/*") if work.is_dir() and not _held(work)]
    return sorted(rows, key=lambda row: (-row.bytes, row.path))


def free(rows: list[Unused]) -> None:
    """Delete the listed folders."""
    for row in rows:
        shutil.rmtree(row.path)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _held(work: Path) -> bool:
    lock = work.with_name(work.name + ".lock")
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
