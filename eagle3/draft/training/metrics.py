"""Training and evaluation metrics: sums over rows first, ratios last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.acceptance.figures import GenerationCounts
from eagle3.draft.data.row import Row
from eagle3.draft.unroll.objective import LossOutput


class Tally:
    """Sums over rows, kept on the device, one column per TTT step t.

    A draft token is correct only if it is the target's most likely token over the *whole* vocabulary.
    """

    COUNT, LOSS, CORRECT, CHAINS, UNBROKEN = range(5)

    def __init__(self, unroll: int, device: torch.device) -> None:
        # Apple's GPUs have no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(5, unroll, dtype=dtype, device=device)

    def add(self, row: Row, output: LossOutput) -> None:
        """Count every (step, root) pair of a row."""
        # Tables of steps and roots: those alive at a step are its first ones.
        place = torch.arange(len(row.order), device=row.starts.device)
        alive = place < row.starts.diff()[:, None]
        pairs = (row.starts[:-1, None] + place).clamp_max(len(row.pairs) - 1)
        loss, correct = output.loss[pairs].masked_fill_(~alive, 0), output.correct[pairs] & alive
        unbroken = correct.cumprod(0)
        chains = alive.clone()
        chains[1:].logical_and_(unbroken[:-1])
        columns = [alive, loss, correct, chains, unbroken]
        self.sums[:, : len(alive)].add_(torch.stack([column.sum(1, dtype=self.sums.dtype) for column in columns]))

    def reduce(self) -> Tally:
        """Add up the sums of all processes, on every process."""
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        return self

    def read(self) -> dict[str, list[float]]:
        """Return the ratios and reset the sums.

        Returns:
            per step: `loss` (mean), `accuracy` (share of correct draft tokens), `conditional` (the same where all
            earlier draft tokens of the chain were correct).
        """
        count, loss, correct, chains, unbroken = self.sums.clone().cpu()
        self.sums.zero_()
        return {
            "loss": _ratios(loss, count),
            "accuracy": _ratios(correct, count),
            "conditional": _ratios(unbroken, chains),
        }


def expected_acceptance_length(conditional: Sequence[float]) -> float:
    """Return 1 + sum_{t<k} prod_{i<=t} conditional_i: tokens per verification of a greedy chain of k tokens."""
    length, unbroken = 1.0, 1.0
    for rate in conditional:
        unbroken *= rate
        length += unbroken
    return length


def accepted_draft_tokens(row: Row, output: LossOutput, target_ids: Tensor, draft_tokens: int) -> list[int]:
    """Return for every root, in position order, how many leading draft tokens equal the tokens that follow [R]."""
    hits = (target_ids[output.drafted] == row.labels[row.ahead]).split(row.alive)
    accepted = torch.zeros(len(row.order), dtype=torch.int64, device=row.order.device)
    unbroken: Tensor | None = None
    for hit in hits[:draft_tokens]:
        unbroken = hit if unbroken is None else unbroken[: len(hit)] & hit
        accepted[: len(hit)] += unbroken
    in_position_order = torch.empty_like(accepted)
    in_position_order[row.order] = accepted
    result: list[int] = in_position_order.tolist()
    return result


def replay(accepted: Sequence[int], source: str, draft_tokens: int, sample: str = "") -> GenerationCounts:
    """Walk one generated span as serving would.

    Args:
        accepted: for the span's roots in order, how many leading draft tokens are accepted there.
        source: where the prompt came from.
        draft_tokens: tokens per step (k).
        sample: id of the sample.

    Returns:
        steps and accepted tokens of the walk p -> p + accepted + 1 from the span's first root.
    """
    steps = []
    place = 0
    while place < len(accepted):
        steps.append(accepted[place])
        place += accepted[place] + 1
    return GenerationCounts(
        source, len(steps), [sum(n > position for n in steps) for position in range(draft_tokens)], sample
    )


def _ratios(part: Tensor, whole: Tensor) -> list[float]:
    result: list[float] = (part / whole.clamp_min(1)).tolist()
    return result
