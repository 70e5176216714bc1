"""Files that appear under their name complete or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; when the block ends, its file is synced and renamed to `path`.

    If the block raises, `path` is unchanged and the temporary file is removed: on a full disk it would take up the
    space that the user frees. A killed process leaves the temporary file; its name starts with a dot, so it never
    becomes part of an artifact.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
