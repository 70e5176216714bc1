"""Evaluation on held-out samples: the objective's metrics, and serving replayed exactly.

In serving with a greedy chain of k drafts, the root after every verification is the last committed token, and its
drafts are kept up to the first one that differs from the target's own next token. Over a target's greedy response
that is a function of the drafts at every root, and those come from one teacher-forced pass: a draft is only looked
at if all before it were kept, that is, if the chain was fed with the true tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.acceptance.figures import Drafted
from eagle3.draft.data.loader import Rows, root_ranges
from eagle3.draft.data.packing import pack
from eagle3.draft.model.network import Draft
from eagle3.draft.training import parallel
from eagle3.draft.training.metrics import Tally, accepted_drafts, replay
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        metrics: per step, from `Tally.read`.
        drafted: the replay of every generation.
    """

    metrics: dict[str, list[float]]
    drafted: list[Drafted]


@torch.no_grad()
def evaluate(
    draft: Draft,
    rows: Rows,
    teacher: Teacher,
    embedding: Tensor,
    objective: Objective,
    drafts: int,
    batch_tokens: int,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run the exact unroll over all samples of `rows`.

    Args:
        draft: on the device of `embedding`.
        rows: samples, summarised; their unroll is at least `drafts`.
        teacher: the target's head.
        embedding: [V, H], in compute dtype.
        objective: for the loss that is reported.
        drafts: k, the length of the chain that is replayed.
        batch_tokens: tokens of one row.
        between: called before every row, by every process equally often; what it raises ends the evaluation.
    """
    weights = prepare(draft, embedding.dtype)
    tally = Tally(rows.unroll, embedding.device)
    drafted: list[Drafted] = []
    plan = pack([sample.context for sample in rows.samples], batch_tokens, np.random.default_rng(0))
    share = plan[parallel.rank() :: parallel.world()]
    stream = rows.stream((members, 0) for members in share)
    for turn in range(-(-len(plan) // parallel.world())):
        between()
        if turn == len(share):
            # The last turn has no row for some processes.
            break
        members, row = share[turn], next(stream).to(embedding.device)
        hidden = unroll(weights, row, embedding)
        outcome = projected_loss(hidden, weights.lm_head, teacher, row, objective, [1] * rows.unroll)
        tally.add(row, outcome)
        accepted = accepted_drafts(row, outcome, draft.target_ids, drafts)
        for sample, first, end in root_ranges(rows.samples, members, rows.unroll):
            drafted.append(replay(accepted[first:end], sample.source, drafts, sample.id))
    return Evaluation(tally.reduce().read(), parallel.gather(drafted))
