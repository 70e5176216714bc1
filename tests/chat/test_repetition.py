"""Loops are found wherever they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.chat.repetition import LOOP_TOKENS, loop_period

SMALL = st.lists(st.integers(0, 3), max_size=60)


def periods(ids: list[int], max_repeats: int) -> list[int]:
    """Return every period that comes often enough somewhere, by trying all of them at every place."""
    found = []
    for period in range(1, len(ids) // (max_repeats + 1) + 1):
        length = max((max_repeats + 1) * period, LOOP_TOKENS)
        for start in range(len(ids) - length + 1):
            part = ids[start : start + length]
            if all(a == b for a, b in zip(part, part[period:], strict=False)):
                found.append(period)
                break
    return found


@given(
    head=SMALL,
    passage=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    times=st.integers(1, 12),
    tail=SMALL,
    max_repeats=st.integers(2, 5),
)
def test_as_by_hand(head: list[int], passage: list[int], times: int, tail: list[int], max_repeats: int) -> None:
    ids = head + passage * times + tail
    expected = periods(ids, max_repeats)
    if not expected or expected[0] <= 9:
        assert loop_period(ids, max_repeats) == (expected[0] if expected else None)


@given(st.integers(11, 400), st.integers(2, 9), st.integers(0, 300), st.integers(0, 300), st.integers(0, 99))
def test_long_passages(period: int, max_repeats: int, head: int, tail: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    passage = random.integers(0, 40_000, period).tolist()
    before, after = (random.integers(0, 40_000, size).tolist() for size in (head, tail))
    assert loop_period(before + passage * (max_repeats + 1) + after, max_repeats) == period
    assert loop_period(before + passage * max_repeats + after, max_repeats) is None


@pytest.mark.parametrize("ids", [[], [1], [1] * 31, list(range(500)), [1, 2] * 15])
def test_what_is_not_a_loop(ids: list[int]) -> None:
    assert loop_period(ids, 8) is None


def test_a_ruler_of_one_token_is_one_from_32_on() -> None:
    assert loop_period([7, *[1] * 32, 8], 8) == 1
