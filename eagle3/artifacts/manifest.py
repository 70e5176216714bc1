"""The manifest: what an artifact folder holds, what it was made from, and by which software.

An *artifact* is a folder that one job makes. Its `manifest.json` is written last, so a folder with a manifest is
complete. File hashes in manifests are how a stage knows its inputs without reading terabytes again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.errors import Eagle3Error
from eagle3.files.hashing import sha256

NAME = "manifest.json"


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: int
    sha256: str


class Acceptance(BaseModel):
    """One `eagle3 accept`: a user declared that an edit of the code does not affect the artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    by: str
    """user@host"""
    at: str
    """Time in UTC, ISO 8601."""
    fingerprint: str
    """Of the earlier code."""
    key: str
    """Under the earlier code."""


class Manifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    key: str
    fingerprint: str
    settings: dict[str, Any]
    inputs: dict[str, dict[str, str]]
    """For every role, the files of other artifacts that were read (as given) and their sha256."""
    sources: dict[str, str]
    """Files from outside the workflow that were read, and their sha256."""
    files: dict[str, FileEntry]
    """Relative path in the folder -> size and sha256."""
    counts: dict[str, Any]
    """What the stage counted: rows, tokens, rejects by reason, agreement."""
    versions: dict[str, str]
    """Versions of the software that made it, engine included."""
    accepted: list[Acceptance] = []
    """The declarations that carried it over to later code, oldest first."""


def read(folder: Path) -> Manifest:
    """Read the manifest of an artifact folder.

    Raises:
        Eagle3Error: the manifest is missing or damaged.
    """
    try:
        return parse(folder / NAME)
    except FileNotFoundError:
        raise Eagle3Error(
            "an artifact has no manifest: it was not finished, or not made by this workflow",
            where=folder,
            remedy="run the stage that makes it",
        ) from None


def parse(path: Path) -> Manifest:
    """Read a manifest file.

    Raises:
        FileNotFoundError: there is none.
        Eagle3Error: it is damaged.
    """
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise Eagle3Error(
            "a manifest is damaged", where=path, found=error, remedy="delete it and run snakemake again"
        ) from None


def folder_of(file: Path) -> Path:
    """Return the artifact folder that holds `file`: the nearest parent folder with a manifest."""
    for folder in file.absolute().parents:
        if (folder / NAME).is_file():
            return folder
    raise Eagle3Error(
        "an input file does not belong to a finished artifact",
        where=file,
        expected=f"a {NAME} in its folder or a parent folder",
        remedy="run the stage that makes it, or delete the file and run snakemake again",
    )


def entry_of(file: Path) -> tuple[Manifest, FileEntry]:
    """Return the manifest of the artifact that holds `file`, and the file's entry in it."""
    folder = folder_of(file)
    manifest = read(folder)
    name = file.absolute().relative_to(folder).as_posix()
    if name not in manifest.files:
        raise Eagle3Error("a file is not listed in the manifest of its artifact", where=file, found=folder / NAME)
    return manifest, manifest.files[name]


def check_file(path: Path, entry: FileEntry, *, content: bool = True) -> None:
    """Compare a file with its manifest entry.

    Args:
        path: the file.
        entry: its entry in the manifest.
        content: compare the hash as well as the size.

    Raises:
        Eagle3Error: the file is missing, truncated or altered.
    """
    remedy = "delete the file and run snakemake again: only this artifact is rebuilt"
    if not path.is_file():
        raise Eagle3Error("a file of an artifact is missing", where=path, remedy=remedy)
    size = path.stat().st_size
    if size != entry.bytes:
        raise Eagle3Error(
            "a file of an artifact has changed size since it was made",
            where=path,
            found=f"{size:,} bytes",
            expected=f"{entry.bytes:,} bytes",
            remedy=remedy,
        )
    if content and (digest := sha256(path)) != entry.sha256:
        raise Eagle3Error(
            "a file of an artifact was altered after it was made",
            where=path,
            found=f"sha256 {digest}",
            expected=f"sha256 {entry.sha256}",
            remedy=remedy,
        )
