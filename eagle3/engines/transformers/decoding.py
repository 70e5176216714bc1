"""Decoding a batch, token by token. B rows · V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3.engines.base import Sampling
from eagle3.engines.transformers.batch import Batch

# Nucleus sampling sorts this many of the likeliest tokens, and all of them only if these do not reach `top_p`.
_CANDIDATES = 1024
# Finished rows are dropped when at most this share of the batch is unfinished: dropping them copies the cache.
_WORTH_DROPPING = 0.75


@dataclass
class Answer:
    """One row's generated ids, the end token included, and the counts of speculation (see `speculation`)."""

    limit: int
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    steps: int = 0
    accepted: list[int] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], stop_ids: Collection[int]) -> int:
        """Append ids up to an end token or the limit; return how many were appended."""
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if token_id in stop_ids or len(self.token_ids) == self.limit:
                self.finished = True
                return count
        return len(token_ids)


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Collection[int],
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Answer]:
    """Continue every prompt until an end token or its limit.

    Args:
        model: the target.
        prompts: token ids of each row.
        limits: maximum number of tokens for each row.
        stop_ids: ids that end a generation.
        sampling: how to choose tokens.
        seeds: of each row's own random generator.
    """
    answers = [Answer(limit) for limit in limits]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    live = list(range(len(prompts)))
    batch = Batch(model)
    logits = batch.prefill(prompts)
    while True:
        tokens = choose(logits, sampling, [generators[row] for row in live])
        for row, token in zip(live, tokens.tolist(), strict=True):
            if not answers[row].finished:
                answers[row].take([token], stop_ids)
        if (kept := unfinished(answers, live, tokens.device)) is not None:
            if not len(kept):
                return answers
            live, tokens = [live[index] for index in kept.tolist()], tokens[kept]
            batch.select(kept)
        logits = batch.extend(tokens[:, None])[:, 0]
        batch.accept(1)


def unfinished(answers: Sequence[Answer], live: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Return which of the live rows stay ([B'] int64), if it is worth dropping the finished ones."""
    kept = [index for index, row in enumerate(live) if not answers[row].finished]
    if len(kept) > _WORTH_DROPPING * len(live):
        return None
    return torch.tensor(kept, dtype=torch.long, device=device)


def choose(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Choose a token [B] for every row of logits [B, V].

    Each row draws one random number per token from its own generator, so that its tokens do not depend on the
    other rows.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / sampling.temperature).softmax(-1)
    ids = None
    if sampling.top_p < 1:
        probabilities, ids = _nucleus(probabilities, sampling.top_p)
    draws = torch.cat([torch.rand(1, generator=generator) for generator in generators]).to(logits.device)
    mass = probabilities.cumsum(-1)
    index = torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)
    # Rounding may bring a draw up to the whole mass: then take the first entry that reaches it, the last with any mass.
    index = index.minimum((mass < mass[:, -1:]).sum(-1, keepdim=True))
    return (index if ids is None else ids.gather(-1, index))[:, 0]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens' probabilities and ids [B, n], 0 beyond the smallest set that reaches `top_p`."""
    kept, ids = probabilities.topk(min(_CANDIDATES, probabilities.shape[-1]), dim=-1)
    if bool((kept.sum(-1) < top_p).any()):
        kept, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = kept.cumsum(-1) - kept
    return kept.masked_fill(before >= top_p, 0.0), ids
