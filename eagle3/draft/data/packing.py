"""Which positions carry loss, and how samples share rows.

Notation as in `eagle3.draft.unroll.unroll`: a *root* is a position p from which a chain of draft tokens starts; its
*lifetime* is the number of steps t with m_t[p] = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Spans = Sequence[Sequence[int]]
Array = NDArray[np.int64]

# Samples that compete for the same rows. Larger windows waste less and shuffle less.
WINDOW = 1024


def supervised_roots(spans: Spans, unroll: int) -> tuple[Array, Array]:
    """Return the roots of one sample and their lifetimes.

    m_t[p] = 1 iff p+1 and p+2+t lie in the same generated span: p+1 is a committed token, and what step t drafts is
    still part of that generation. So span [s, e) has the roots s-1 .. e-3, and root p lives min(unroll, e-2-p) steps.

    The loss reads the target's last-layer state at p+1 (the teacher row, which predicts x[p+2]): rows s .. e-2 of the
    span. Row s-1, which predicts the span's first token, is stored as well, but only `eagle3 verify` reads it.

    Args:
        spans: sorted, disjoint [start, end) ranges of generated tokens.
        unroll: number of steps T.

    Returns:
        positions [R], ascending, and lifetimes [R], all >= 1.
    """
    # A span that starts the sequence has no position before it.
    positions = [np.arange(max(start - 1, 0), end - 2) for start, end in spans]
    lifetimes = [np.minimum(unroll, end - 2 - roots) for roots, (_, end) in zip(positions, spans, strict=True)]
    return _concatenate(positions), _concatenate(lifetimes)


def step_counts(spans: Spans, unroll: int) -> Array:
    """Return the number of positions with m_t = 1 for every step t [unroll]."""
    roots = np.array([len(range(max(start - 1, 0), end - 2)) for start, end in spans], dtype=np.int64)
    counts: Array = np.maximum(roots[:, None] - np.arange(unroll), 0).sum(axis=0)
    return counts


def context_length(spans: Spans) -> int:
    """Return how many positions of a sample the draft reads: up to its last root."""
    return max((end - 2 for start, end in spans if end - 2 > max(start - 1, 0)), default=0)


def sample_lifetimes(lifetimes: Array, decay: float, random: np.random.Generator) -> Array:
    """Shorten lifetimes at random so that step t is kept with probability decay^t (the sampled unroll)."""
    if decay == 1:
        return lifetimes
    return np.minimum(lifetimes, random.geometric(1 - decay, size=len(lifetimes)))


def pack(lengths: Sequence[int], capacity: int, random: np.random.Generator) -> list[list[int]]:
    """Distribute samples over rows of at most `capacity` tokens: first-fit decreasing inside shuffled windows.

    Args:
        lengths: tokens of every sample, all positive; those above `capacity` get a row of their own.
        capacity: tokens of a row.
        random: decides the order of samples and rows.

    Returns:
        rows of sample indices; every index occurs exactly once.
    """
    order = random.permutation(len(lengths)).tolist()
    rows: list[list[int]] = []
    for window in _windows(order):
        opened: list[list[int]] = []
        space: list[int] = []
        for index in sorted(window, key=lambda index: -lengths[index]):
            length = lengths[index]
            row = next((row for row, free in enumerate(space) if free >= length), len(opened))
            if row == len(opened):
                opened.append([])
                space.append(capacity)
            opened[row].append(index)
            space[row] -= length
        rows += opened
    return [rows[index] for index in random.permutation(len(rows)).tolist()]


def _windows(order: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(order), WINDOW):
        yield order[start : start + WINDOW]


def _concatenate(parts: list[Array]) -> Array:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
