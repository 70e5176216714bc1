"""Acceptance: what simulated and served measurements have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eagle3.files.hashing import hash_of
from eagle3.files.records import in_turn
from eagle3.records import Sample


@dataclass(frozen=True)
class Drafted:
    """What drafting gave for one generation.

    Attributes:
        source: where its prompt came from.
        steps: verification steps in which the draft proposed tokens.
        accepted: for each draft position 0..k-1, in how many steps the draft there was kept. A draft is kept
            only if all before it in the step were, so the numbers never rise.
        sample: id of the held-out sample.
    """

    source: str
    steps: int
    accepted: Sequence[int]
    sample: str = ""


def choose(samples: Iterable[Sample], count: int) -> list[Sample]:
    """Choose the samples that are served: up to `count`, taking the sources in turn, of a source by the ids' hashes."""
    by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        by_source.setdefault(sample["source"], []).append(sample)
    columns = [sorted(by_source[source], key=lambda sample: hash_of(sample["id"])) for source in sorted(by_source)]
    return list(islice(in_turn(columns), count))


def summarise(drafted: Iterable[Drafted], drafts: int) -> dict[str, Any]:
    """Return the figures over all generations, and under `per_source` those of each source.

    Sums are divided by sums, never means averaged. `per_position` is conditional: of the steps in which all
    drafts before position i were kept, the share that also kept position i. Where nothing is to be divided
    by, the figure is None.

    Args:
        drafted: one entry per generation.
        drafts: drafts per step (k).
    """
    entries = list(drafted)
    sources = sorted({entry.source for entry in entries})
    return {
        "drafts": drafts,
        **_figures(entries, drafts),
        "per_source": {
            source: _figures([entry for entry in entries if entry.source == source], drafts) for source in sources
        },
    }


def _figures(entries: Sequence[Drafted], drafts: int) -> dict[str, Any]:
    steps = sum(entry.steps for entry in entries)
    accepted = [sum(entry.accepted[position] for entry in entries) for position in range(drafts)]
    reached = [steps, *accepted]
    return {
        "generations": len(entries),
        "steps": steps,
        "accepted": accepted,
        "acceptance_length": 1 + sum(accepted) / steps if steps else None,
        "per_position": [
            accepted[position] / reached[position] if reached[position] else None for position in range(drafts)
        ],
    }
