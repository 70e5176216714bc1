"""What is in the store but not used by any run. Nothing is deleted unless the user asks for it."""

from __future__ import annotations

import fcntl
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3.artifacts import manifest
from eagle3.artifacts.store import Store


@dataclass(frozen=True)
class Unused:
    """A folder that no run under `results/` uses."""

    path: Path
    kind: str
    """`artifact`: finished, but no longer used; `work`: started and never finished."""
    bytes: int


def unused(store: Store) -> list[Unused]:
    """List finished artifacts that no run uses, and abandoned work, largest first.

    Work folders that a running job holds are not listed.
    """
    used = {
        (found.stage, found.key)
        for run in store.results.glob("*")
        if run.is_dir() and not run.name.startswith(".")
        for found in (manifest.read(path.parent) for path in run.rglob(manifest.NAME))
    }
    entries = [entry for entry in sorted(store.entries.glob("*/*")) if not _keys(entry) & used]
    work = [folder for folder in sorted(store.work.glob("*/*")) if folder.is_dir() and not _held(folder)]
    # An accepted artifact is in the store twice but on the disk once.
    links = Counter(_inode(file) for folder in entries for file in _files(folder))
    rows = [Unused(entry, "artifact", _size(entry, links)) for entry in entries]
    rows += [Unused(folder, "work", _size(folder, {})) for folder in work]
    return sorted(rows, key=lambda row: (-row.bytes, row.path))


def free(rows: list[Unused]) -> None:
    """Delete the listed folders."""
    for row in rows:
        shutil.rmtree(row.path)


def _keys(entry: Path) -> set[tuple[str, str]]:
    """Return the keys under which an entry may be in use: its own, and those that it was accepted from."""
    earlier = manifest.read(entry).accepted if (entry / manifest.NAME).is_file() else []
    return {(entry.parent.name, key) for key in (entry.name, *(acceptance.key for acceptance in earlier))}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _inode(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino


def _size(folder: Path, links: Mapping[tuple[int, int], int]) -> int:
    """Return the bytes that deleting the folder frees; files in several of the listed folders count once in all."""
    size = 0
    for file in _files(folder):
        stat, listed = file.stat(), links.get(_inode(file), 1)
        if stat.st_nlink <= listed:
            size += stat.st_size // listed
    return size


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
