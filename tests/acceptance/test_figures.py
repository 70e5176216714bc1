"""Acceptance figures: ratios of sums, conditional positions, sources kept apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.acceptance.figures import GenerationCounts, acceptance_figures


def test_figures_are_ratios_of_sums() -> None:
    figures = acceptance_figures([GenerationCounts("chat", 4, [4, 2, 1]), GenerationCounts("code", 12, [4, 4, 0])], 3)
    assert figures["steps"] == 16
    assert figures["accepted"] == [8, 6, 1]
    assert figures["acceptance_length"] == pytest.approx(1 + 15 / 16)
    assert figures["per_position"] == pytest.approx([8 / 16, 6 / 8, 1 / 6])
    assert figures["per_source"]["chat"]["acceptance_length"] == pytest.approx(1 + 7 / 4)
    assert figures["per_source"]["code"]["per_position"] == pytest.approx([4 / 12, 1.0, 0.0])


def test_nothing_drafted_gives_no_figure_instead_of_a_wrong_one() -> None:
    figures = acceptance_figures([GenerationCounts("chat", 0, [0, 0])], 2)
    assert figures["acceptance_length"] is None
    assert figures["per_position"] == [None, None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=20)), max_size=8))
def test_length_follows_from_steps_and_from_positions(generations: list[tuple[str, list[int]]]) -> None:
    """Counting kept drafts step by step gives the same length as the product over conditional positions."""
    entries = [
        GenerationCounts(source, len(kept), [sum(n > position for n in kept) for position in range(3)])
        for source, kept in generations
    ]
    figures = acceptance_figures(entries, 3)
    steps = [n for _, kept in generations for n in kept]
    if not steps:
        assert figures["acceptance_length"] is None
        return
    assert figures["acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps))
    length, chance = 1.0, 1.0
    for conditional in figures["per_position"]:
        chance *= conditional or 0.0
        length += chance
    assert figures["acceptance_length"] == pytest.approx(length)
    assert sum(entry["steps"] for entry in figures["per_source"].values()) == figures["steps"]
