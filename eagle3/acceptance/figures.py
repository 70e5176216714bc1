"""Acceptance figures: what simulated and served measurements have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

from eagle3.files.hashing import hash_of
from eagle3.files.records import in_turn
from eagle3.records import Sample


@dataclass(frozen=True)
class GenerationCounts:
    """Verification steps and accepted draft tokens of one generation.

    Attributes:
        source: where its prompt came from.
        steps: verification steps in which the draft model proposed tokens.
        accepted: for each position 0..k-1 of the chain, in how many steps the draft token there was accepted. A
            token is accepted only if all before it are, so the counts never increase.
        sample: id of the held-out sample.
    """

    source: str
    steps: int
    accepted: Sequence[int]
    sample: str = ""


class SourceFigures(TypedDict):
    """Figures over some generations: sums divided by sums, never means of ratios; None where the divisor is 0."""

    generations: int
    steps: int
    accepted: list[int]
    """[k]: per position"""
    acceptance_length: float | None
    """tokens per verification step: 1 + accepted draft tokens / steps"""
    per_position: list[float | None]
    """[k]: conditional. Of the steps that accepted all positions before i, the share that accepted i as well."""


class AcceptanceFigures(SourceFigures):
    """Figures over all generations, and those of each source."""

    drafts: int
    """draft tokens per step (k)"""
    per_source: dict[str, SourceFigures]


def choose(samples: Iterable[Sample], count: int) -> list[Sample]:
    """Choose up to `count` samples to serve: from each source in turn, ordered by the hashes of their ids."""
    by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        by_source.setdefault(sample["source"], []).append(sample)
    columns = [sorted(by_source[source], key=lambda sample: hash_of(sample["id"])) for source in sorted(by_source)]
    return list(islice(in_turn(columns), count))


def acceptance_figures(generations: Iterable[GenerationCounts], draft_tokens: int) -> AcceptanceFigures:
    """Return the figures over all generations and per source, with `draft_tokens` per step (k)."""
    entries = list(generations)
    sources = sorted({entry.source for entry in entries})
    return {
        "drafts": draft_tokens,
        **_source_figures(entries, draft_tokens),
        "per_source": {
            source: _source_figures([entry for entry in entries if entry.source == source], draft_tokens)
            for source in sources
        },
    }


def _source_figures(entries: Sequence[GenerationCounts], draft_tokens: int) -> SourceFigures:
    steps = sum(entry.steps for entry in entries)
    accepted = [sum(entry.accepted[position] for entry in entries) for position in range(draft_tokens)]
    reached = [steps, *accepted]
    return {
        "generations": len(entries),
        "steps": steps,
        "accepted": accepted,
        "acceptance_length": 1 + sum(accepted) / steps if steps else None,
        "per_position": [
            accepted[position] / reached[position] if reached[position] else None for position in range(draft_tokens)
        ],
    }
