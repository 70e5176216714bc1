"""Prompts: rows of all sources in, checked and deduplicated prompts out, divided into parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3.config.prompts import PromptsSettings
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import range_of
from eagle3.files.records import write_json, write_records
from eagle3.files.spool import Spool
from eagle3.prompts.reader import Reader
from eagle3.records import Prompt


def make(
    settings: PromptsSettings, *, sources: Sequence[Path] = (), synthetic: Path | None = None, folder: Path
) -> dict[str, Any]:
    """Write `part-{p}.jsonl.zst`, `rejects.jsonl.zst` and `stats.json` into `folder`.

    A part holds the prompts whose id falls into its range of the hash, sorted by id: adding or removing a
    prompt changes one part. Of prompts that repeat each other, the first in the order of the sources is kept.

    Args:
        settings: the sources, and what to take from them.
        sources: all files from outside the workflow, as `settings.outside_files()` gives them.
        synthetic: the user turns that the target wrote, for a source with `synthetic: true`.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: a source is missing, unreadable or empty, or gives no usable prompt.
    """
    if (found := settings.outside_files()) != list(sources):
        raise Eagle3Error(
            "the files of the prompt sources have changed since they were planned",
            found=", ".join(map(str, found)),
            expected=", ".join(map(str, sources)),
            remedy="run the command again",
        )
    reader = Reader(settings, synthetic, Spool(folder / ".spool"))
    write_records(folder / "rejects.jsonl.zst", reader.rejects())
    sizes = _write_parts(settings, folder, reader.kept())
    stats = reader.stats()
    write_json(folder / "stats.json", {**stats, "parts": sizes})
    if not sum(sizes):
        raise Eagle3Error("no prompt is left", where="prompts.sources", found=stats["total"])
    return {**stats["total"], "parts": len(sizes)}


def _write_parts(settings: PromptsSettings, folder: Path, prompts: Iterator[Prompt]) -> list[int]:
    """Write sorted prompts part by part; return the parts' sizes."""
    sizes = [0] * settings.parts
    for part, members in groupby(prompts, lambda prompt: range_of(prompt["id"][:8], settings.parts)):
        sizes[part] = write_records(folder / f"part-{part}.jsonl.zst", members)
    for part, size in enumerate(sizes):
        if not size:
            write_records(folder / f"part-{part}.jsonl.zst", ())
    return sizes
