"""Vocabulary: training samples in, the target tokens that the draft model can propose out.

Only the generated part of the training samples is counted; tokens that steer a conversation (end of turn, end of
reasoning, marks of tool calls) are always included.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from eagle3.chat.template import Chat, load_chat
from eagle3.config.vocabulary import VocabularySettings
from eagle3.console import Progress
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import sha256
from eagle3.files.records import read_records, write_json
from eagle3.files.tensors import write_tensors
from eagle3.target.pin import load_target

Ids = NDArray[np.int64]

_BATCH_TOKENS = 1 << 20
_LISTED_OUTSIDE = 50


def make(settings: VocabularySettings, *, target: Path, train: Path, folder: Path) -> dict[str, Any]:
    """Write `vocabulary.safetensors` and `stats.json` into `folder`.

    Tensors: `d2t` int64 [Vd] (target id = i + d2t[i], ascending), `t2d` bool [V] (whether a target token is in the
    draft vocabulary), `counts` int64 [V] (in the training spans). The metadata holds the coverage, in total and per
    source, the sha256 of the training data and the target's revision.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: the requested size does not fit, or nothing was generated.
    """
    pinned = load_target(target)
    chat = load_chat(pinned)
    forced = np.array(sorted(id for id in chat.answer_ids if id < pinned.vocab_size), dtype=np.int64)
    by_source = count_tokens(train, pinned.vocab_size)
    counts: Ids = np.sum(list(by_source.values()), axis=0, dtype=np.int64) if by_source else np.zeros(0, np.int64)
    if not counts.sum():
        raise Eagle3Error(
            "the training data contains no generated tokens",
            where=train,
            expected="samples with non-empty spans",
            remedy="see stats.json of the stage `samples` for what was rejected and why",
        )
    chosen = choose(counts, forced, settings)
    t2d = np.zeros(pinned.vocab_size, dtype=bool)
    t2d[chosen] = True
    d2t = chosen - np.arange(len(chosen))
    assert np.array_equal(np.flatnonzero(t2d), d2t + np.arange(len(d2t)))
    coverage = _coverage(counts, t2d)
    sources = {name: _coverage(found, t2d) for name, found in sorted(by_source.items())}
    write_tensors(
        folder / "vocabulary.safetensors",
        {"d2t": d2t, "t2d": t2d, "counts": counts},
        {
            "coverage": f"{coverage:.6f}",
            "coverage_per_source": orjson.dumps(sources, option=orjson.OPT_SORT_KEYS).decode(),
            "data_sha256": sha256(train),
            "target_revision": pinned.revision,
        },
    )
    summary = {
        "size": len(chosen),
        "target vocabulary": pinned.vocab_size,
        "generated tokens": int(counts.sum()),
        "distinct tokens": int(np.count_nonzero(counts)),
        "never seen": int(np.count_nonzero(counts[chosen] == 0)),
        "coverage": coverage,
    }
    write_json(folder / "stats.json", {**summary, "sources": sources, **_listings(chat, counts, t2d, forced)})
    return {**summary, "coverage per source": sources}


def count_tokens(train: Path, vocab_size: int) -> dict[str, Ids]:
    """Return, per source, how often each target token occurs in the spans: int64 [V].

    Raises:
        Eagle3Error: a token id is outside the target's vocabulary.
    """
    counts: dict[str, Ids] = defaultdict(lambda: np.zeros(vocab_size, dtype=np.int64))
    waiting: dict[str, list[int]] = defaultdict(list)

    def flush(source: str) -> None:
        found = np.bincount(waiting.pop(source), minlength=vocab_size)
        if len(found) > vocab_size:
            raise Eagle3Error(
                "a token id is outside the target's vocabulary",
                where=train,
                found=len(found) - 1,
                expected=f"less than {vocab_size}",
                remedy="the samples were made with another target: run the stages from `responses` on again",
            )
        counts[source] += found

    with Progress(None, "counting tokens", "samples") as bar:
        for record in read_records(train):
            bar.update(1)
            source = record["source"]
            for start, end in record["spans"]:
                waiting[source] += record["input_ids"][start:end]
            if len(waiting[source]) >= _BATCH_TOKENS:
                flush(source)
    for source in list(waiting):
        flush(source)
    return dict(counts)


def choose(counts: Ids, forced: Ids, settings: VocabularySettings) -> Ids:
    """Return the draft's target ids, ascending: the forced ones, then the most frequent, then the lowest.

    Args:
        counts: [V].
        forced: ids that are always in.
        settings: size or coverage; the whole vocabulary if neither is set.

    Raises:
        Eagle3Error: the requested size does not fit.
    """
    always = np.zeros(len(counts), dtype=bool)
    always[forced] = True
    # Last key first: forced before others, frequent before rare, low ids before high ones.
    order = np.lexsort((np.arange(len(counts)), -counts, ~always))
    size = len(counts) if settings.size is None else settings.size
    if settings.coverage is not None:
        reached = np.cumsum(counts[order]) >= settings.coverage * counts.sum()
        size = max(int(np.argmax(reached)) + 1, len(forced))
    if not len(forced) <= size <= len(counts):
        raise Eagle3Error(
            "the draft vocabulary cannot have this size",
            where="vocabulary.size",
            found=size,
            expected=f"{len(forced)} (tokens that must be in it) to {len(counts)} (the target's vocabulary)",
            remedy="choose another size, or null for the whole vocabulary",
        )
    return np.sort(order[:size]).astype(np.int64)


def _coverage(counts: Ids, t2d: NDArray[np.bool_]) -> float:
    return float(counts[t2d].sum() / max(counts.sum(), 1))


def _listings(chat: Chat, counts: Ids, t2d: NDArray[np.bool_], forced: Ids) -> dict[str, Any]:
    """Return the forced tokens, and the most frequent tokens outside the draft vocabulary."""
    outside = np.flatnonzero(~t2d & (counts > 0))
    outside = outside[np.lexsort((outside, -counts[outside]))][:_LISTED_OUTSIDE]

    def listing(ids: Ids) -> list[dict[str, Any]]:
        return [{"id": int(id), "text": chat.tokenizer.decode([int(id)]), "count": int(counts[id])} for id in ids]

    return {"forced": listing(forced), "outside": listing(outside)}
