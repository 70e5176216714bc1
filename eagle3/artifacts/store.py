"""The artifact store: an artifact is computed once, and never lost by accident.

    results/.store/<stage>/<key>/    finished artifacts, each with its manifest
    results/.work/<stage>/<key>/     work in progress, append-only, locked
    results/<run>/<stage>/...        hard links into the store: what Snakemake sees, and may delete as it likes

The *key* is a hash over the stage's code fingerprint, its settings and the sha256 of its inputs. `produce` looks
the key up first: a hit is linked in milliseconds. Otherwise the stage works in its work folder, verifies what it
made, and the folder moves into the store in one rename. A stage that is killed continues in the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from eagle3.artifacts import manifest as manifests
from eagle3.artifacts.manifest import FileEntry, Manifest
from eagle3.console import say
from eagle3.errors import Eagle3Error
from eagle3.files.atomic import atomic_write
from eagle3.files.hashing import sha256

Inputs = Mapping[str, Sequence[Path]]
Make = Callable[[Path], Mapping[str, Any]]

# Artifacts whose own format has a checksum on every frame; re-hashing terabytes before training costs hours.
SELF_CHECKED = frozenset({"hidden_states"})
# Artifacts of which one file is named as an input and the others are read with it: config and weights, for example.
READ_WHOLE = frozenset({"target", "draft", "export"})
# Files in a work folder with this prefix are the stage's own notes for resuming; they do not enter the store.
SCRATCH = "."


class Store:
    """The store under one results folder."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.entries = results / ".store"
        self.work = results / ".work"

    def produce(
        self,
        stage: str,
        *,
        fingerprint: str,
        settings: Mapping[str, Any],
        inputs: Inputs,
        sources: Sequence[Path] = (),
        output: Path,
        make: Make,
        versions: Mapping[str, str],
    ) -> tuple[Manifest, bool]:
        """Bring the artifact for these inputs into `output`; compute it only if the store has none.

        Args:
            stage: the stage's name.
            fingerprint: hash of the code that makes it.
            settings: what the stage may depend on besides its inputs.
            inputs: role -> files of finished artifacts.
            sources: input files that no stage made, such as the user's prompts.
            output: the folder to link the artifact into.
            make: called with the work folder; writes the files there, verifies them and returns counts.
            versions: software versions to record.

        Returns:
            the manifest, and whether the artifact was adopted instead of computed.

        Raises:
            Eagle3Error: an input is damaged, the disk is full, or whatever `make` found wrong.
        """
        hashes = {role: {str(file): _identify(file) for file in files} for role, files in sorted(inputs.items())}
        outside = {str(file): sha256(file) for file in sources}
        key = content_key(stage, fingerprint, settings, hashes, outside)
        entry = self.entries / stage / key
        with _translate_os_errors(output), self._lock(stage, key):
            found = self._lookup(stage, key)
            adopted = found is not None
            if found is None:
                work = self.work / stage / key
                work.mkdir(parents=True, exist_ok=True)
                # Left by a job killed between writing it and moving the folder; it would count as the stage's file.
                (work / manifests.NAME).unlink(missing_ok=True)
                counts = make(work)
                found = Manifest(
                    stage=stage,
                    key=key,
                    fingerprint=fingerprint,
                    settings=dict(settings),
                    inputs=hashes,
                    sources=outside,
                    files=_describe(work),
                    counts=dict(counts),
                    versions=dict(versions),
                )
                _commit(work, entry, found)
            _link(entry, output, found)
            self._drop_stale(output)
        return found, adopted

    def find(self, stage: str, key: str) -> Manifest | None:
        """Return the manifest of a finished artifact, if the store has it."""
        folder = self.entries / stage / key
        return manifests.read(folder) if (folder / manifests.NAME).is_file() else None

    def enter(self, folder: Path, made: Manifest, accepted: Manifest) -> None:
        """Enter the artifact in `folder`, which `made` describes, once more as `accepted`: links, no copies.

        Raises:
            Eagle3Error: a file is missing, truncated or altered.
        """
        for name, file in made.files.items():
            check(folder / name, file, made)
        work = self.work / accepted.stage / f"{accepted.key}.accepted"
        with _translate_os_errors(work), self._lock(accepted.stage, accepted.key):
            if self.find(accepted.stage, accepted.key) is not None:
                return
            shutil.rmtree(work, ignore_errors=True)
            _link_files(folder, work, made.files)
            _commit(work, self.entries / accepted.stage / accepted.key, accepted)

    def _lookup(self, stage: str, key: str) -> Manifest | None:
        """Return the entry's manifest if it is there and undamaged.

        A damaged entry goes back to the work folder without its damaged files: the stage rebuilds only those.
        """
        entry = self.entries / stage / key
        if not (entry / manifests.NAME).is_file():
            return None
        found = manifests.read(entry)
        damaged = []
        for name, file in found.files.items():
            try:
                check(entry / name, file, found)
            except Eagle3Error as error:
                say(f"{error}\n  it is rebuilt")
                damaged.append(name)
        if not damaged:
            return found
        (entry / manifests.NAME).unlink()
        for name in damaged:
            (entry / name).unlink(missing_ok=True)
        work = self.work / stage / key
        shutil.rmtree(work, ignore_errors=True)
        entry.rename(work)
        return None

    @contextmanager
    def _lock(self, stage: str, key: str) -> Iterator[None]:
        """Lock the key: a job that outlived its Snakemake, and its successor, never write to the same folder."""
        folder = self.work / stage
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _drop_stale(self, output: Path) -> None:
        """Unlink, in this run, the manifests of artifacts that were made from bytes no longer there.

        Snakemake compares no mtimes here. If it is stopped between this job and the next, only a missing output
        tells it that the next one is still to be made. The artifacts stay in the store.
        """
        results = self.results.absolute()
        if not output.absolute().is_relative_to(results):
            return
        run = results / output.absolute().relative_to(results).parts[0]
        current = {}
        for path in sorted(run.rglob(manifests.NAME)):
            # Jobs of the same run do this side by side: another one may have unlinked it.
            with suppress(FileNotFoundError):
                current[path] = manifests.parse(path)
        present = {file.sha256 for found in current.values() for file in found.files.values()}
        for path, found in current.items():
            if any(digest not in present for files in found.inputs.values() for digest in files.values()):
                path.unlink(missing_ok=True)


def content_key(
    stage: str,
    fingerprint: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Mapping[str, str]],
    sources: Mapping[str, str],
) -> str:
    """Return the key (24 hex digits) of an artifact; paths of files do not count, their order within a role does."""
    roles = {role: list(files.values()) for role, files in inputs.items()}
    recipe = [stage, fingerprint, settings, roles, list(sources.values())]
    return hashlib.sha256(orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)).hexdigest()[:24]


def check(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Compare a file with its manifest entry before it is used.

    Files with checksums of their own are hashed only if something wrote to them after the manifest was written.

    Raises:
        Eagle3Error: the file is missing, truncated or altered.
    """
    content = manifest.stage not in SELF_CHECKED
    if not content and path.is_file():
        content = path.stat().st_mtime_ns > (manifests.folder_of(path) / manifests.NAME).stat().st_mtime_ns
    manifests.check_file(path, entry, content=content)


def _identify(file: Path) -> str:
    """Return the sha256 of an input file after comparing the file with its manifest."""
    found, entry = manifests.entry_of(file)
    check(file, entry, found)
    if found.stage in READ_WHOLE:
        folder = manifests.folder_of(file)
        for name, other in found.files.items():
            check(folder / name, other, found)
    return entry.sha256


def _describe(folder: Path) -> dict[str, FileEntry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = [path for path in files if not any(part.startswith(SCRATCH) for part in path.relative_to(folder).parts)]
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256(path)) for path in kept
    }


def _commit(work: Path, entry: Path, manifest: Manifest) -> None:
    """Move a finished work folder into the store: scratch removed, manifest last, usual modes, one rename."""
    for path in work.iterdir():
        if path.name.startswith(SCRATCH):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = orjson.dumps(manifest.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    with atomic_write(work / manifests.NAME) as temporary:
        temporary.write_bytes(text)
    # Libraries write through temporary files that only their owner may read; a file just opened has the usual mode.
    usual = stat.S_IMODE((work / manifests.NAME).stat().st_mode)
    for name in manifest.files:
        if stat.S_IMODE((work / name).stat().st_mode) != usual:
            (work / name).chmod(usual)
    entry.parent.mkdir(parents=True, exist_ok=True)
    work.rename(entry)


def _link(entry: Path, output: Path, manifest: Manifest) -> None:
    """Hard-link an entry's files into `output`, manifest last."""
    (output / manifests.NAME).unlink(missing_ok=True)
    _link_files(entry, output, [*manifest.files, manifests.NAME])


def _link_files(source: Path, destination: Path, names: Iterable[str]) -> None:
    for name in names:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source / name, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            shutil.copyfile(source / name, target)


@contextmanager
def _translate_os_errors(output: Path) -> Iterator[None]:
    """Say what a full disk or a read-only folder means for the user."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem, remedy = (
                "the disk is full",
                "free space (`eagle3 gc` lists what no run uses) and run snakemake again: it resumes",
            )
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            problem, remedy = (
                "a folder cannot be written to",
                "make it writable, or choose another results folder",
            )
        else:
            raise
        raise Eagle3Error(problem, where=error.filename or output, found=error.strerror, remedy=remedy) from error
