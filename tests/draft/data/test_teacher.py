"""Teacher stats: the definition, and what the next start of a run finds."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.draft.data.row import TeacherStats
from eagle3.draft.data.teacher import StatsBySample, TeacherHead, cached_stats
from tests.draft.conftest import H, V, random_head


def test_most_likely_tokens_and_sums_over_both_vocabularies() -> None:
    generator = torch.Generator().manual_seed(1)
    head, ids = random_head(generator), torch.arange(1, V, 4)
    states = torch.randn(50, H, generator=generator)
    top, lse, draft_lse, negentropy = TeacherHead(head, ids, torch.device("cpu"), torch.float32)(states)
    normed = states.double() / (states.double().pow(2).mean(-1, keepdim=True) + head.rms_norm_eps).sqrt() * head.norm
    for place, logits in enumerate(normed @ head.lm_head.double().T):
        best = int(logits.argmax())
        assert int(top[place]) == (ids.tolist().index(best) if best in ids else -1)
        torch.testing.assert_close(lse[place].double(), logits.exp().sum().log(), rtol=1e-5, atol=0)
        torch.testing.assert_close(draft_lse[place].double(), logits[ids].exp().sum().log(), rtol=1e-5, atol=0)
        entropy = torch.distributions.Categorical(logits=logits[ids]).entropy()
        torch.testing.assert_close(-negentropy[place].double(), entropy, rtol=1e-5, atol=0)
    assert 0 < int((top >= 0).sum()) < len(top)


def test_another_start_finds_them_unless_they_were_made_from_something_else(tmp_path: Path) -> None:
    made = []

    def make() -> StatsBySample:
        made.append(
            StatsBySample(["a", "b"], [2, 3], TeacherStats(torch.arange(5, dtype=torch.int32), *torch.rand(3, 5)))
        )
        return made[-1]

    path = tmp_path / ".teacher-stats"
    cached_stats(path, "one", make)
    again = cached_stats(path, "one", make)
    assert len(made) == 1
    assert again["b"].top.tolist() == [2, 3, 4]
    assert torch.equal(again["a"].lse, made[0]["a"].lse)
    cached_stats(path, "two", make)
    assert len(made) == 2
    assert torch.equal(cached_stats(path, "two", make)["b"].lse, made[1]["b"].lse)
