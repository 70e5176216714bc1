"""Which positions count, and how rows are filled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle3.draft.data.packing import context_length, pack, sample_lifetimes, step_counts, supervised_roots


@st.composite
def span_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Sorted, disjoint spans, touching ones and empty prompts included."""
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=8)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    # Two generations may follow each other without a gap.
    return [
        part
        for s, e in spans
        for part in ([(s, (s + e) // 2), ((s + e) // 2, e)] if draw(st.booleans()) and e - s > 1 else [(s, e)])
    ]


def roots_seen_in_serving(spans: list[tuple[int, int]], unroll: int) -> dict[int, int]:
    """Serve every generation with every possible number of accepted draft tokens; record which were verified.

    The target has committed x[..c]; the draft root is c-1 and draft t stands for x[c+1+t].
    """
    seen: dict[int, int] = {}
    for start, end in spans:
        for committed in range(start, end):
            root = committed - 1
            drafts = [t for t in range(unroll) if committed + 1 + t < end]
            if root >= 0 and drafts:
                seen[root] = len(drafts)
    return seen


@given(span_lists(), st.integers(1, 6))
def test_roots_are_those_that_serving_uses(spans: list[tuple[int, int]], unroll: int) -> None:
    roots, lifetimes = supervised_roots(spans, unroll)
    expected = roots_seen_in_serving(spans, unroll)
    assert dict(zip(roots.tolist(), lifetimes.tolist(), strict=True)) == expected
    assert roots.tolist() == sorted(expected)
    assert step_counts(spans, unroll).tolist() == [sum(n > t for n in expected.values()) for t in range(unroll)]
    assert context_length(spans) == max((root + 1 for root in expected), default=0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(0, 5))
def test_every_sample_is_in_one_row_and_rows_do_not_overflow(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 50, np.random.default_rng(seed))
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= 50 or len(row) == 1


def test_packing_wastes_less_than_two_per_cent_on_real_lengths() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.2, 0.8, 4000), 16, 8192).astype(int).tolist()
    rows = pack(lengths, 8192, random)
    assert 1 - sum(lengths) / (8192 * len(rows)) < 0.02


def test_packing_depends_on_the_seed_alone() -> None:
    lengths = [5, 9, 30, 12, 7, 22] * 20
    one, same, other = (pack(lengths, 50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_sampled_lifetimes_keep_step_t_with_probability_decay_to_the_t() -> None:
    full = np.full(200_000, 5)
    lifetimes = sample_lifetimes(full, 0.8, np.random.default_rng(0))
    shares = [(lifetimes > t).mean() for t in range(6)]
    np.testing.assert_allclose(shares, [1, 0.8, 0.64, 0.512, 0.4096, 0], atol=0.005)
