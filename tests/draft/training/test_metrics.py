"""What the log and the evaluations report equals a count by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft.data.row import Row, build_row
from eagle3.draft.training.metrics import Tally
from eagle3.draft.unroll.objective import LossOutput
from tests.draft.conftest import random_states

UNROLL = 6
# The longest chain has five draft tokens: none reaches the last step.
SPANS = [[(4, 10)], [(2, 4), (6, 9), (9, 14)]], [[(1, 7)]]


def random_output(row: Row, share: float, generator: torch.Generator) -> LossOutput:
    """Losses and hits at random, about `share` of them correct."""
    size = sum(row.alive)
    correct = torch.rand(size, generator=generator) < share
    loss = torch.rand(size, generator=generator)
    return LossOutput(loss.sum(), None, loss, torch.zeros(size, dtype=torch.int64), correct)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_rates_are_those_of_chains_followed_one_by_one(share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    tally = Tally(UNROLL, torch.device("cpu"))
    chains: list[list[tuple[float, bool]]] = []
    for number, group in enumerate(SPANS * 3):
        samples = [(random_states(f"{number}", spans[-1][1], spans, generator), spans) for spans in group]
        row = build_row(samples, UNROLL)
        output = random_output(row, share, generator)
        tally.add(row, output)
        of_row: list[list[tuple[float, bool]]] = [[] for _ in row.order]
        pairs = iter(zip(output.loss.tolist(), output.correct.tolist(), strict=True))
        for alive in row.alive:
            for root in range(alive):
                of_row[root].append(next(pairs))
        chains += of_row
    found = tally.read()
    for step in range(UNROLL):
        drafts = [chain[step] for chain in chains if len(chain) > step]
        reached = [chain for chain in chains if len(chain) > step and all(hit for _, hit in chain[:step])]
        kept = sum(chain[step][1] for chain in reached)
        assert found["loss"][step] == pytest.approx(sum(loss for loss, _ in drafts) / max(len(drafts), 1))
        assert found["accuracy"][step] == pytest.approx(sum(hit for _, hit in drafts) / max(len(drafts), 1))
        assert found["conditional"][step] == pytest.approx(kept / max(len(reached), 1))
    assert not any(map(any, tally.read().values())), "reading resets the sums"
