"""Dataset: the samples of all parts in, shuffled training and evaluation samples out, split by conversation.

Order and split follow from hashes of seed and ids: they do not depend on how the samples were divided into parts, and
adding a source leaves those of the others unchanged. The same holds for answers that repeat another one of their
source: the one with the lowest id is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from eagle3.config.dataset import DatasetSettings
from eagle3.console import Progress
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import fraction_of, hash_of
from eagle3.files.records import RecordWriter, read_records, write_json
from eagle3.files.spool import Spool
from eagle3.records import Sample


def make(settings: DatasetSettings, *, samples: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Write `train.jsonl.zst`, `eval.jsonl.zst`, `rejects.jsonl.zst` and `stats.json` into `folder`.

    Memory does not grow with the samples' lengths, only with their number.

    Args:
        settings: share held out, seed.
        samples: the samples of all parts.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: no sample to train on or to evaluate on is left, or a sample id is duplicated.
    """
    conversations: dict[str, Counter[str]] = defaultdict(Counter)
    spool = Spool(folder / ".spool")
    repeats = _Repeats(settings.duplicate_tokens)
    for record in _progress(samples, "reading samples"):
        repeats.see(record)
        conversations[record["source"]][record["conversation"]] += 1
        spool.add(hash_of(settings.seed, record["id"]), record)
    for id, source in repeats.sources.items():
        conversations[source][id.rpartition("-")[0]] -= 1
    members = {source: {id for id, count in found.items() if count} for source, found in conversations.items()}
    held_out = choose_held_out(members, settings)
    counts: dict[str, Counter[str]] = {source: Counter() for source in sorted(conversations)}
    previous = None
    with (
        RecordWriter(folder / "train.jsonl.zst") as train,
        RecordWriter(folder / "eval.jsonl.zst") as evaluation,
        RecordWriter(folder / "rejects.jsonl.zst") as rejects,
    ):
        for _, record in spool:
            id, source = record["id"], record["source"]
            if id == previous:
                raise Eagle3Error("duplicate sample id", where=id, found=", ".join(map(str, samples)))
            previous = id
            counts[source]["rows"] += 1
            if (kept := repeats.kept_instead(id)) is not None:
                reason = {"reason": "duplicate_response", "detail": f"as {kept}"}
                rejects.write({"id": id, "source": source, **reason, "record": record})
                continue
            held = record["conversation"] in held_out
            (evaluation if held else train).write(record)
            _count(counts[source], "eval" if held else "train", record)
    for source, found in members.items():
        counts[source]["conversations"] = len(found)
        counts[source]["eval conversations"] = len(found & held_out)
    summary = _summary(counts, repeats)
    assert summary["total"]["rows"] == train.count + evaluation.count + rejects.count
    write_json(folder / "stats.json", summary)
    total: dict[str, Any] = summary["total"]
    return dict(sorted(total.items()))


class _Repeats:
    """Finds answers that repeat another one of their source: a canned answer, or one that an engine mixed up.

    Short answers ("Yes.") may well be the same. Each source is searched on its own, so adding one changes no other.
    """

    def __init__(self, tokens: int) -> None:
        self.sources: dict[str, str] = {}
        """Id of a sample that is rejected -> its source."""
        self._keys: dict[str, bytes] = {}
        self._tokens = tokens
        self._first: dict[bytes, str] = {}

    def see(self, record: Sample) -> None:
        answer = [id for start, end in record["spans"] for id in record["input_ids"][start:end]]
        if len(answer) < self._tokens:
            return
        id, source = record["id"], record["source"]
        key = hashlib.blake2b(orjson.dumps([source, answer]), digest_size=12).digest()
        first = self._first.setdefault(key, id)
        if first != id:
            self._first[key] = min(first, id)
            self.sources[max(first, id)] = source
            self._keys[max(first, id)] = key

    def kept_instead(self, id: str) -> str | None:
        """Return the id of the sample that is kept instead of a rejected one; None if `id` is not rejected."""
        key = self._keys.get(id)
        return None if key is None else self._first[key]


def _summary(counts: Mapping[str, Counter[str]], repeats: _Repeats) -> dict[str, Any]:
    """Return all counts, per source and in total; every row is accounted for."""
    rejected = Counter(repeats.sources.values())
    for source, found in counts.items():
        assert found["rows"] == found["train samples"] + found["eval samples"] + rejected[source]
    total = sum(counts.values(), Counter[str]())

    def reasons(count: int) -> dict[str, int]:
        return {"duplicate_response": count} if count else {}

    return {
        "sources": {source: {**found, "rejects": reasons(rejected[source])} for source, found in counts.items()},
        "total": {**total, "rejects": reasons(rejected.total())},
    }


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
    # Every source has only one conversation.
    return held_out or {min(everything, key=lambda id: hash_of(settings.seed, "split", id))}


def _progress(samples: Sequence[Path], title: str) -> Iterator[Sample]:
    with Progress(None, title, "samples") as bar:
        for path in samples:
            for record in read_records(path):
                bar.update(1)
                yield record


def _count(counts: Counter[str], split: str, record: Sample) -> None:
    counts[f"{split} samples"] += 1
    counts[f"{split} tokens"] += len(record["input_ids"])
    counts[f"{split} supervised tokens"] += sum(end - start for start, end in record["spans"])
