"""Decoding a batch with a draft model: it proposes, the target verifies, and greedy output is unchanged.

B rows · k draft tokens a step · A tapped layers · H hidden size · p position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.engines.base import Sampling
from eagle3.engines.transformers.batch import Batch, at, padded, tapped
from eagle3.engines.transformers.decoding import Answer, choose, unfinished
from eagle3.export.reference_draft import ReferenceDraft, load_reference_draft


def load_draft(folder: Path, model: Any) -> ReferenceDraft:
    """Load an exported draft for a target, whose embedding it shares."""
    return load_reference_draft(folder, model.get_input_embeddings().weight.detach())


@torch.inference_mode()
def speculate(
    model: Any,
    draft: ReferenceDraft,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Collection[int],
    k: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Answer]:
    """Continue every prompt; the draft model proposes k tokens a step, and the target keeps those it agrees with.

    The target chooses a token at every position, and a draft token is kept if it is that token. With a distribution p,
    draft token d is kept with probability p(d), and its replacement is drawn from the rest of p. So answers have
    the same distribution as without a draft model.

    After each step the draft model's keys of the kept positions are recomputed from the target's own states, as
    engines do. Its cache slot is the position, so they replace those of the draft tokens.
    """
    answers = [Answer(limit, accepted=[0] * k) for limit in limits]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    live = list(range(len(prompts)))
    batch = Batch(model)
    chain = draft.chain()
    with tapped(model, draft.layer_ids) as states:
        pending = choose(batch.prefill(prompts), sampling, generators)
        for row, token in zip(live, pending.tolist(), strict=True):
            answers[row].take([token], stop_ids)
        last = batch.lengths - 1
        # The draft at position p reads token p+1.
        following = padded(prompts).to(pending.device).roll(-1, dims=1)
        following = following.scatter(1, last[:, None], pending[:, None])
        chain.commit(following, torch.cat(states, -1), torch.zeros_like(last), last)
        while True:
            if (kept := unfinished(answers, live, pending.device)) is not None:
                if not len(kept):
                    return answers
                live, pending = [live[index] for index in kept.tolist()], pending[kept]
                batch.select(kept)
                chain.select(kept)
            proposed = chain.propose(k)
            logits = batch.extend(torch.cat([pending[:, None], proposed], 1))
            own = [generators[row] for row in live]
            verified = torch.stack([choose(logits[:, place], sampling, own) for place in range(k + 1)], 1)
            agreed = (verified[:, :k] == proposed).long().cumprod(1).sum(1)
            chain.commit(verified, torch.cat(states, -1), batch.lengths, agreed)
            batch.accept(agreed + 1)
            pending = at(verified, agreed)
            for row, token_ids, count in zip(live, verified.tolist(), agreed.tolist(), strict=True):
                if not answers[row].finished:
                    taken = answers[row].take(token_ids[: count + 1], stop_ids)
                    _record(answers[row], taken, count, ended=answers[row].token_ids[-1] in stop_ids)


def _record(answer: Answer, taken: int, agreed: int, *, ended: bool) -> None:
    """Count a step. Draft tokens after an end token are not accepted ones; those cut off by our own limit are."""
    answer.steps += 1
    for position in range(min(taken, agreed) if ended else agreed):
        answer.accepted[position] += 1
