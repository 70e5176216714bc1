"""Attention of the unrolled draft: one causal kernel over step-0 keys, own-column keys folded in.

At step t the query of root p sees the step-0 keys of positions j <= p of its sample and its own keys of steps 1..t:
one softmax over p+1+t keys. The first part is ordinary causal attention over packed samples; a fused kernel returns
its log-sum-exp. The second part, at most T-1 keys a root, is an element-wise product.

Backward needs no gradient of the log-sum-exp: a flash kernel computes dS = P (dP - delta) from the *final* output and
log-sum-exp it is given, so with those of the joint softmax it returns the exact gradients of its part (the identity
that ring attention rests on, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.ops.dispatch import kernel_on_gpu
from eagle3.draft.ops.flash import Segments, flash_backward, flash_forward

# Queries of one block of the plain implementation: bounds its score matrix.
BLOCK = 256


class Keys(NamedTuple):
    """What roots see, or the gradients of it."""

    k0: Tensor
    """[C, Hkv, d] step-0 keys of all context positions, rotated"""
    v0: Tensor
    """[C, Hkv, dv] their values"""
    own_k: Tensor
    """[n_1 + n_2 + .., Hkv, d] the roots' own keys of steps 1, 2, .."""
    own_v: Tensor
    """[n_1 + n_2 + .., Hkv, dv]"""
    starts: Tensor
    """[steps] int64: where the own keys of each step start, counted from anywhere"""


class Attention:
    """Attention of all steps of a pass.

    The causal kernel has N queries, one for every slot, in position order; roots are sorted by lifetime. Some slots
    have no root that is alive, and between two spans there never is one: their queries are finite, nobody reads their
    outputs, and in backward their softmax is made 0.
    """

    def __init__(self, keys: Keys, slots: Tensor, segments: Segments, scale: float) -> None:
        """Take what roots see, the slots of all of them [R], and the factor on the scores."""
        self.keys, self.slots, self.segments, self.scale = keys, slots, segments, scale
        self.wide: tuple[Tensor, ...] = ()
        self.sums: list[Tensor] = []
        # Roots that backward has seen in a later step.
        self.seen = 0

    def forward(self, q: Tensor, t: int, out: Tensor) -> Tensor:
        """Attend from the n roots of step t, whose own keys of steps 1..t are there.

        Args:
            q: [n, Hq, d] queries, rotated.
            t: the step.
            out: [n, Hq, dv], where to put the output.

        Returns:
            log-sum-exp [n, Hq] in float32.
        """
        if not self.wide:
            self.wide = (q.new_zeros(self.segments.q[-1], *q.shape[1:]),)
        slots = self.slots[: len(q)]
        _spread(slots, (q,), self.wide)
        wide_out, wide_lse = causal_forward(self.wide[0], self.keys.k0, self.keys.v0, self.segments, self.scale)
        return _fold(q, wide_out, wide_lse, slots, self.keys, t, self.scale, out)

    def backward(
        self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, t: int, gradients: Keys, d_q: Tensor
    ) -> None:
        """Write the gradient of q to `d_q`; add those of the keys and values to `gradients`.

        The last step is first, and step 0 is last: only then are the gradients of step-0 keys and values there.
        """
        if len(self.wide) == 1:
            # From here on the roots only become more: what has no root keeps a softmax of 0.
            N, shape = self.segments.q[-1], out.shape[1:]
            mass = lse.new_full((shape[0], N), torch.inf).mT
            self.wide = (*self.wide, *out.new_zeros(2, N, *shape), mass)
        slots = self.slots[: len(q)]
        _spread(slots, (q, d_out, out, lse), self.wide)
        wide_q, wide_d, wide_out, wide_lse = self.wide
        k0, v0 = self.keys.k0, self.keys.v0
        wide_d_q, *found = causal_backward(wide_d, wide_q, wide_out, wide_lse, k0, v0, self.segments, self.scale)
        self.sums = [total.add_(x) for total, x in zip(self.sums, found, strict=True)] if self.sums else found
        if t == 0:
            gradients.k0.copy_(self.sums[0])
            gradients.v0.copy_(self.sums[1])
        _fold_backward(d_q, wide_d_q, d_out, q, out, lse, slots, self.keys, gradients, t, self.scale, self.seen)
        self.seen = len(q)


@kernel_on_gpu
def _spread(slots: Tensor, tensors: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> None:
    """Put what n roots have [n, ...] into their slots [N, ...]: queries, or also d_out, out and log-sum-exp."""
    for x, goal in zip(tensors, wide, strict=True):
        goal[slots] = x


@kernel_on_gpu
def _fold(
    q: Tensor, wide_out: Tensor, wide_lse: Tensor, slots: Tensor, keys: Keys, steps: int, scale: float, out: Tensor
) -> Tensor:
    """Read a finished softmax from the roots' slots [N, ...] and add their own keys of some steps; write the output to
    `out` and return the log-sum-exp.
    """
    own = _own_rows(keys, steps, len(q))
    grouped = q.float().unflatten(1, (keys.own_k.shape[1], -1))
    scores = (grouped * keys.own_k[own].float()[:, :, :, None]).sum(-1) * scale
    before = wide_lse[slots].view(scores.shape[1:])
    total = torch.logaddexp(before, scores.logsumexp(0))
    result = wide_out[slots].float().unflatten(1, (keys.own_k.shape[1], -1)) * (before - total).exp()[..., None]
    result += ((scores - total).exp()[..., None] * keys.own_v[own].float()[:, :, :, None]).sum(0)
    out.copy_(result.flatten(1, 2))
    return total.flatten(1)


@kernel_on_gpu
def _fold_backward(
    d_q: Tensor,
    wide_d_q: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    slots: Tensor,
    keys: Keys,
    gradients: Keys,
    steps: int,
    scale: float,
    seen: int,
) -> None:
    """Write to `d_q` what the roots' slots hold and the part of their own keys; add the gradients of these, which are
    there for the first `seen` roots.
    """
    own = _own_rows(keys, steps, len(q))
    grouped, d_grouped = (x.float().unflatten(1, (keys.own_k.shape[1], -1)) for x in (q, d_out))
    delta = (d_out.float() * out.float()).sum(-1).view(grouped.shape[:-1])
    wide = keys.own_k[own].float()[:, :, :, None]
    weights = ((grouped * wide).sum(-1) * scale - lse.view(delta.shape)).exp()
    d_scores = weights * ((d_grouped * keys.own_v[own].float()[:, :, :, None]).sum(-1) - delta) * scale
    gradients.own_k[own[:, seen:]] = 0
    gradients.own_v[own[:, seen:]] = 0
    gradients.own_k[own] += (d_scores[..., None] * grouped).sum(3)
    gradients.own_v[own] += (weights[..., None] * d_grouped).sum(3)
    d_q.copy_(wide_d_q[slots].float() + (d_scores[..., None] * wide).sum(0).flatten(1, 2))


def _own_rows(keys: Keys, steps: int, n: int) -> Tensor:
    """Where the own keys of n roots lie [steps, n]."""
    return (keys.starts[:steps, None] - keys.starts[0]) + torch.arange(n, device=keys.starts.device)


def causal_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention inside every segment.

    Returns:
        output [N, Hq, dv] and log-sum-exp [N, Hq] in float32.
    """
    if q.is_cuda:
        return flash_forward(q, k, v, segments, scale)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, keys, hidden in _blocks(segments):
        scores = _scores(q[rows], k[keys], hidden, scale)
        lse_block = scores.logsumexp(-1)
        lse[rows] = lse_block.permute(2, 0, 1).flatten(1)
        out[rows] = _ungroup((scores - lse_block[..., None]).exp() @ v[keys].transpose(0, 1)[:, None])
    return out, lse


def causal_backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `causal_forward` for the softmax that `out` and `lse` belong to."""
    if q.is_cuda:
        return flash_backward(d_out, q, out, lse, k, v, segments, scale)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = k.shape[1]
    delta = (d_out * out).sum(-1)
    for rows, keys, hidden in _blocks(segments):
        weights = (_scores(q[rows], k[keys], hidden, scale) - _group(lse[rows, :, None], groups)).exp()
        d_grouped = _group(d_out[rows], groups)
        d_scores = d_grouped @ v[keys].transpose(0, 1)[:, None].mT - _group(delta[rows, :, None], groups)
        d_scores = d_scores * weights * scale
        dq[rows] = _ungroup(d_scores @ k[keys].transpose(0, 1)[:, None])
        dk[keys] += (d_scores.mT @ _group(q[rows], groups)).sum(1).transpose(0, 1)
        dv[keys] += (weights.mT @ d_grouped).sum(1).transpose(0, 1)
    return dq, dk, dv


def _blocks(segments: Segments) -> list[tuple[slice, slice, Tensor]]:
    """Cut the queries into blocks: rows, the keys they can see, and which of those are hidden [rows, keys]."""
    blocks, device = [], segments.q_offsets.device
    for sample in range(len(segments.q) - 1):
        first, end = segments.q[sample], segments.q[sample + 1]
        start, last = segments.k[sample], segments.k[sample + 1]
        for row in range(first, end, BLOCK):
            stop = min(row + BLOCK, end)
            # The key after the last one that a query sees, from the block's first query to its last.
            beyond = torch.arange(last - end + row + 1, last - end + stop + 1, device=device)
            keys = slice(start, last - end + stop)
            hidden = torch.arange(keys.start, keys.stop, device=device) >= beyond[:, None]
            blocks.append((slice(row, stop), keys, hidden))
    return blocks


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[rows, Hq, d] x [keys, Hkv, d] -> [Hkv, G, rows, keys], float32, hidden keys at -inf."""
    scores = _group(q, k.shape[1]) @ k.transpose(0, 1)[:, None].mT
    masked: Tensor = (scores.float() * scale).masked_fill_(hidden, -torch.inf)
    return masked


def _group(x: Tensor, groups: int) -> Tensor:
    """[rows, Hq, d] -> [Hkv, G, rows, d]."""
    grouped: Tensor = x.unflatten(1, (groups, -1))
    return grouped.permute(1, 2, 0, 3)


def _ungroup(x: Tensor) -> Tensor:
    """[Hkv, G, rows, d] -> [rows, Hq, d]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)
