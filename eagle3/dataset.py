"""Dataset: merge the samples of all parts, shuffle them and split them by conversation.

Order and split follow from hashes of seed and ids: they do not depend on how the samples were divided into parts, and
another source leaves those of the others as they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from eagle3.console import progress
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import fraction_of, hash_of
from eagle3.files.records import Record, RecordWriter, read_records, write_json
from eagle3.files.spool import Spool
from eagle3.settings import Settings


class DatasetSettings(Settings):
    """Order and split."""

    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the conversations, per source, that is held out; at least one of a source that has two or more."""
    seed: int = 0


def make(settings: DatasetSettings, *, samples: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Write `train.jsonl.zst`, `eval.jsonl.zst` and `stats.json` into `folder`.

    Memory does not grow with the samples, only with the number of conversations.

    Args:
        settings: share held out, seed.
        samples: the samples of all parts.
        folder: where to work.

    Raises:
        Eagle3Error: no sample to train on or to evaluate on is left, or a sample is there twice.
    """
    conversations: dict[str, set[str]] = defaultdict(set)
    spool = Spool(folder / ".spool")
    for record in _progress(samples, "reading samples"):
        conversations[record["source"]].add(record["conversation"])
        spool.add(hash_of(settings.seed, record["id"]), record)
    held_out = choose_held_out(conversations, settings)
    counts: dict[str, Counter[str]] = {source: Counter() for source in sorted(conversations)}
    previous = None
    with RecordWriter(folder / "train.jsonl.zst") as train, RecordWriter(folder / "eval.jsonl.zst") as evaluation:
        for _, record in spool:
            if record["id"] == previous:
                raise Eagle3Error("a sample is there twice", where=record["id"], found=", ".join(map(str, samples)))
            previous = record["id"]
            held = record["conversation"] in held_out
            (evaluation if held else train).write(record)
            _count(counts[record["source"]], "eval" if held else "train", record)
    for source, members in conversations.items():
        counts[source]["conversations"] = len(members)
        counts[source]["eval conversations"] = len(members & held_out)
    total = sum(counts.values(), Counter[str]())
    write_json(folder / "stats.json", {"sources": counts, "total": total})
    return dict(sorted(total.items()))


def choose_held_out(conversations: Mapping[str, set[str]], settings: DatasetSettings) -> set[str]:
    """Return the conversations for evaluation: of every source those with the lowest hashes.

    Raises:
        Eagle3Error: there are too few conversations for both sides.
    """
    held_out: set[str] = set()
    for members in conversations.values():
        ranked = sorted((hash_of(settings.seed, "split", id), id) for id in members)
        below = sum(fraction_of(rank) < settings.eval_fraction for rank, _ in ranked)
        held_out |= {id for _, id in ranked[: min(max(below, 1), len(ranked) - 1)]}
    everything = {id for members in conversations.values() for id in members}
    if len(everything) < 2:
        raise Eagle3Error(
            "too few conversations are left to train on some and evaluate on others",
            found=f"{len(everything)} with a clean sample",
            expected="at least 2",
            remedy="see stats.json and the rejects of the stage `samples` for what was rejected and why",
        )
    # Where every source has one conversation alone.
    return held_out or {min(everything, key=lambda id: hash_of(settings.seed, "split", id))}


def _progress(samples: Sequence[Path], title: str) -> Iterator[Record]:
    with progress(None, title, "samples") as bar:
        for path in samples:
            for record in read_records(path):
                bar.update(1)
                yield record


def _count(counts: Counter[str], split: str, record: Record) -> None:
    counts[f"{split} samples"] += 1
    counts[f"{split} tokens"] += len(record["input_ids"])
    counts[f"{split} supervised tokens"] += sum(end - start for start, end in record["spans"])
