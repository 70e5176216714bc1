"""Loops: a model that runs in circles repeats a passage over and over, at the end of its answer or in the middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A shorter repetition is a ruler or a row of digits, not a loop.
LOOP_TOKENS = 32

_NGRAM = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def loop_period(ids: Sequence[int], max_repeats: int) -> int | None:
    """Return the length of a passage that `ids` repeat more than `max_repeats` times in a row, if there is one.

    Repetitions count from 32 tokens on. A last repetition that is cut off does not count. Takes linear time: one pass
    finds, for every 8 tokens, how far back they last occurred; a loop shows as one distance that keeps recurring. (A
    passage in which every 8 tokens in a row occur twice would be missed; with up to 9 tokens that is impossible.)

    Args:
        ids: [n].
        max_repeats: at least 2.
    """
    array = np.asarray(ids, dtype=np.int64)
    if len(array) < max(LOOP_TOKENS, max_repeats + 1):
        return None
    distances = Counter(_distances(array))
    # The first passage has nothing before it, and neither may the 8 tokens that cross the end of the last one.
    for period, count in sorted(distances.items()):
        least = max((max_repeats + 1) * period, LOOP_TOKENS)
        if count >= (least - period - _NGRAM) // period and least <= len(array):
            same = array[period:] == array[:-period]
            if _longest_run(same) >= least - period:
                return period
    return None


def _distances(array: NDArray[np.int64]) -> list[int]:
    """Return, for every 8 tokens that occurred before, how far back they last did."""
    hashes = array.astype(np.uint64)
    # Hashes of 1, 2 and 4 tokens are combined into those of 2, 4 and 8; different tokens almost never have equal ones.
    for size in (1, 2, 4):
        hashes = (hashes[:-size] ^ (hashes[:-size] >> np.uint64(29))) * _FACTOR + hashes[size:]
    last: dict[int, int] = {}
    found = []
    for place, value in enumerate(hashes.tolist()):
        if (before := last.get(value)) is not None:
            found.append(place - before)
        last[value] = place
    return found


def _longest_run(same: NDArray[np.bool_]) -> int:
    """Return the length of the longest stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))
