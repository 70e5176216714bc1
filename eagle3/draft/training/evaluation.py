"""Evaluation on held-out samples: the objective's metrics, and serving replayed exactly.

In serving with a greedy chain of k draft tokens, the root after every verification is the last committed token, and
draft tokens are accepted up to the first one that differs from the target's own next token. Over a target's greedy
response that is a function of the draft tokens at every root, and those come from one teacher-forced pass: a draft
token only counts if all before it were accepted, that is, if the chain was fed with the true tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.acceptance.figures import GenerationCounts
from eagle3.draft import parallel
from eagle3.draft.data.loader import RowLoader, root_ranges
from eagle3.draft.data.packing import pack
from eagle3.draft.model.network import Draft
from eagle3.draft.training.metrics import Tally, accepted_draft_tokens, replay
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation."""

    metrics: dict[str, list[float]]
    """per TTT step, from `Tally.read`"""
    generations: list[GenerationCounts]
    """the replay of every generation"""


@torch.no_grad()
def evaluate(
    draft: Draft,
    loader: RowLoader,
    teacher: Teacher,
    embedding: Tensor,
    objective: Objective,
    draft_tokens: int,
    batch_tokens: int,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run the exact unroll over all samples of `loader`.

    Args:
        draft: on the device of `embedding`.
        loader: samples, with their teacher stats; its unroll is at least `draft_tokens`.
        teacher: the target's head on the draft vocabulary.
        embedding: [V, H], in compute dtype.
        objective: for the loss that is reported.
        draft_tokens: k, the length of the chain that is replayed.
        batch_tokens: tokens of one row.
        between: called before every row, equally often in every process; an exception from it ends the evaluation.
    """
    weights = prepare(draft, embedding.dtype)
    tally = Tally(loader.unroll, embedding.device)
    generations: list[GenerationCounts] = []
    plan = pack([sample.context for sample in loader.samples], batch_tokens, np.random.default_rng(0))
    share = plan[parallel.rank() :: parallel.world()]
    stream = loader.stream((members, 0) for members in share)
    for round in range(-(-len(plan) // parallel.world())):
        between()
        if round == len(share):
            # In the last round some processes have no row.
            break
        members, row = share[round], next(stream).to(embedding.device)
        hidden = unroll(weights, row, embedding)
        output = projected_loss(hidden, weights.lm_head, teacher, row, objective, [1] * loader.unroll)
        tally.add(row, output)
        accepted = accepted_draft_tokens(row, output, draft.target_ids, draft_tokens)
        for sample, first, end in root_ranges(loader.samples, members, loader.unroll):
            generations.append(replay(accepted[first:end], sample.source, draft_tokens, sample.id))
    return Evaluation(tally.reduce().read(), parallel.gather(generations))
