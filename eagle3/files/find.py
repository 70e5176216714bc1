"""Files that a path, a folder or a glob in the configuration names."""

from __future__ import annotations

import glob
from pathlib import Path

from eagle3.errors import Eagle3Error

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


def find_files(path: str, setting: str = "prompts.sources") -> list[Path]:
    """Return the files of a source: the file itself, a folder's data files, or what a glob matches; sorted.

    Args:
        path: as written in the configuration.
        setting: name of the setting, for the error message.

    Raises:
        Eagle3Error: no file matches.
    """
    folder = Path(path).is_dir()
    # Unlike `Path.glob`, `glob` accepts absolute patterns and skips hidden files.
    found = glob.glob(f"{glob.escape(path)}/**/*" if folder else path, recursive=True)  # noqa: PTH207
    if folder:
        found = [name for name in found if name.endswith(SUFFIXES)]
    elif not found and Path(path).exists():
        # A literal name that contains brackets or stars.
        found = [path]
    files = [Path(name) for name in sorted(found) if Path(name).is_file()]
    if not files:
        raise Eagle3Error(
            "a prompt source matches no file",
            where=f"`{setting}` in the configuration",
            found=path,
            expected=f"a file, a folder or a glob; files end in {', '.join(SUFFIXES)}",
            remedy="paths are relative to the folder where the command runs",
        )
    return files
