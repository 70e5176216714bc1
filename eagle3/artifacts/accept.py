"""Declares that artifacts of earlier code stay valid under today's.

No hash can know that a reworded message does not matter. Whoever made the edit does, and says so with
`eagle3 accept`; nothing else ever calls this.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.artifacts import manifest as manifests
from eagle3.artifacts.manifest import Acceptance, Manifest
from eagle3.artifacts.registry import STAGES, stage_fingerprint
from eagle3.artifacts.store import Store, content_key
from eagle3.config.configuration import Config
from eagle3.errors import Eagle3Error


@dataclass(frozen=True)
class Accepted:
    """What became of one artifact."""

    folder: Path
    outcome: str
    """`accepted`, `already current`, or why it cannot be accepted."""
    bytes: int
    refused: bool = False


def accept(store: Store, stage: str, run: str | None = None) -> list[Accepted]:
    """Enter a stage's artifacts that runs use in the store, under the key that today's code gives them.

    Args:
        store: the store, under `results/`.
        stage: the stage's name.
        run: only the artifacts of this run; by default those of all.

    Raises:
        Eagle3Error: no such stage or run, or an artifact is damaged.
    """
    if stage not in STAGES:
        raise Eagle3Error("no such stage", found=stage, expected=", ".join(STAGES))
    if run is not None and not (store.results / run).is_dir():
        raise Eagle3Error("no such run", where=store.results / run, remedy="give the name of a folder in results/")
    runs = [store.results / run] if run else sorted(store.results.glob("[!.]*"))
    folders = [path.parent for folder in runs for path in sorted(folder.rglob(manifests.NAME))]
    found = {folder: manifests.read(folder) for folder in folders}
    return [_accept(store, folder, made) for folder, made in found.items() if made.stage == stage]


def _accept(store: Store, folder: Path, made: Manifest) -> Accepted:
    size = sum(file.bytes for file in made.files.values())
    if difference := _reshaped(made):
        return Accepted(folder, f"cannot be accepted: {difference}", size, refused=True)
    fingerprint = stage_fingerprint(made.stage, made.settings)
    key = content_key(made.stage, fingerprint, made.settings, made.inputs, made.sources)
    if key == made.key or store.find(made.stage, key) is not None:
        return Accepted(folder, "already current", size)
    note = Acceptance(
        by=f"{getpass.getuser()}@{socket.gethostname()}",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=made.fingerprint,
        key=made.key,
    )
    changes = {"key": key, "fingerprint": fingerprint, "accepted": [*made.accepted, note]}
    store.enter(folder, made, made.model_copy(update=changes))
    return Accepted(folder, "accepted", size)


def _reshaped(made: Manifest) -> str | None:
    """Say how an artifact's settings differ in form from today's, in which case no run would look up the new key."""
    for section in STAGES[made.stage].sections:
        known = set(Config.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]
        values: Mapping[str, Any] = made.settings.get(section, {})
        added, removed = sorted(known - values.keys()), sorted(values.keys() - known)
        if added or removed:
            words = [f"new: {', '.join(added)}"] * bool(added) + [f"removed: {', '.join(removed)}"] * bool(removed)
            return f"the settings of `{section}` have changed since ({'; '.join(words)})"
    return None
