"""The teacher check: does the captured last state lead to the engine's own token?

An engine returns one greedy token with each capture. It must be argmax(lm_head(norm(last state))). This comparison
notices a wrong layer, a missing or repeated norm, rows of another request, and truncated captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from eagle3.errors import Eagle3Error
from eagle3.hidden_states import codec

if TYPE_CHECKING:
    import torch

    from eagle3.target.weights import HeadWeights

# Rows of lm_head that are converted to float32 at a time: 0.5 GB at Kimi's width.
_HEAD_ROWS = 16384
# Samples that are checked together: an lm_head of gigabytes is read once for all of them.
GROUP = 64


def teacher_tokens(head: HeadWeights, states: torch.Tensor) -> torch.Tensor:
    """Return argmax(lm_head(norm(states))), computed in float32.

    Args:
        head: the target's final norm and lm_head.
        states: bf16 [B, H], the last layer's output before the final norm.

    Returns:
        int64 [B]; the smallest id if several are equal.
    """
    import torch

    x = normed(head, states)
    best = torch.full((len(x),), -torch.inf)
    tokens = torch.zeros(len(x), dtype=torch.int64)
    for start in range(0, len(head.lm_head), _HEAD_ROWS):
        logits = x @ head.lm_head[start : start + _HEAD_ROWS].float().T  # [B, <= _HEAD_ROWS]
        highest, index = logits.max(dim=-1)
        better = highest > best
        best = torch.where(better, highest, best)
        tokens = torch.where(better, index + start, tokens)
    return tokens


def normed(head: HeadWeights, states: torch.Tensor) -> torch.Tensor:
    """Return the target's final RMSNorm of states [..., H], in float32."""
    import torch

    x = states.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + head.rms_norm_eps) * head.norm.float()


def is_tie(head: HeadWeights, state: torch.Tensor, one: int, other: int) -> bool:
    """Whether two tokens have the same logit after a state [H], except for another machine's rounding."""
    first, second = (head.lm_head[[one, other]].float() @ normed(head, state)).tolist()
    return bool(abs(first - second) <= 1e-3 * max(1.0, abs(first)))


class TeacherCheck:
    """Compares teacher and engine for many samples, in groups, and stops a capture that must be wrong.

    Args:
        head: the target's own head.
        minimum: minimum share of samples on which the two must agree.
    """

    def __init__(self, head: HeadWeights, minimum: float) -> None:
        self._head = head
        self._minimum = minimum
        self._waiting: list[tuple[str, codec.Bits, int]] = []
        self.checked = 0
        self.disagreed: list[str] = []

    def add(self, sample: str, last_row: codec.Bits, next_token: int) -> None:
        """Check one sample, now or with a later group.

        Args:
            sample: its id.
            last_row: [H], the last state at the last position.
            next_token: the engine's greedy token after it.

        Raises:
            Eagle3Error: teacher and engine disagree too often.
        """
        self._waiting.append((sample, last_row.copy(), next_token))
        if len(self._waiting) == GROUP:
            self.flush()

    def flush(self) -> None:
        """Check the samples that are waiting.

        Raises:
            Eagle3Error: teacher and engine disagree too often.
        """
        if not self._waiting:
            return
        samples, rows, expected = zip(*self._waiting, strict=True)
        tokens = [int(token) for token in teacher_tokens(self._head, codec.bf16(np.stack(rows)))]
        self._waiting = []
        self.checked += len(tokens)
        self.disagreed += [sample for sample, a, b in zip(samples, tokens, expected, strict=True) if a != b]
        agreement = 1 - len(self.disagreed) / self.checked
        if agreement < self._minimum:
            raise disagreement(agreement, self.checked, self._minimum, self.disagreed)


def disagreement(agreement: float, checked: int, minimum: float, samples: Sequence[str]) -> Eagle3Error:
    """Return the error for a capture whose teacher and engine disagree too often."""
    named = ", ".join(samples[:5]) + (", ..." if len(samples) > 5 else "")
    return Eagle3Error(
        "the captured hidden states do not lead to the tokens that the engine chose",
        where=f"samples {named}",
        found=f"{agreement:.1%} of {checked:,} samples agree with argmax(lm_head(norm(last state)))",
        expected=f"at least {minimum:.1%} (hidden_states.min_teacher_agreement)",
        remedy="check that the engine runs the configured target and returns the states that enter the requested "
        "layers, the last one before the final norm",
    )
