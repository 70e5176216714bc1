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

from eagle3.draft.accelerate import kernel_on_gpu
from eagle3.draft.flash import Segments, flash_backward, flash_forward

# Queries of one block of the plain implementation: bounds its score matrix.
BLOCK = 256


class Keys(NamedTuple):
    """What the n roots of step t see."""

    k0: Tensor
    """[C, Hkv, d] step-0 keys of all context positions, rotated"""
    v0: Tensor
    """[C, Hkv, dv] their values"""
    own_k: Tensor
    """[t, n, Hkv, d] the roots' own keys of steps 1..t"""
    own_v: Tensor
    """[t, n, Hkv, dv]"""


class Places(NamedTuple):
    """Where n roots stand among the queries of a row. Between two spans there are queries without a root."""

    slots: Tensor
    """[n] the query of a root"""
    roots: Tensor
    """[N] the root of a query, any where it has none"""
    empty: Tensor
    """[N, 1] whether it has none"""
    segments: Segments

    @classmethod
    def of(cls, slots: Tensor, segments: Segments) -> Places:
        roots = torch.full((segments.q[-1],), -1, device=slots.device)
        roots[slots] = torch.arange(len(slots), device=slots.device)
        return cls(slots, roots.clamp_min(0), (roots < 0)[:, None], segments)

    def spread(self, x: Tensor) -> Tensor:
        """[n, ...] -> [N, ...]; arbitrary where a query has no root."""
        return x.index_select(0, self.roots)

    def gather(self, x: Tensor) -> Tensor:
        """[N, ...] -> [n, ...]."""
        return x.index_select(0, self.slots)


def attend(q: Tensor, keys: Keys, places: Places, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from n roots at step t.

    Args:
        q: [n, Hq, d] queries, rotated.
        keys: what they see.
        places: where they stand.
        scale: factor on the scores.

    Returns:
        output [n, Hq, dv] and log-sum-exp [n, Hq] in float32.
    """
    out, lse = causal_forward(places.spread(q), keys.k0, keys.v0, places.segments, scale)
    out, lse = places.gather(out), places.gather(lse)
    return _fold(q, out, lse, scale, keys.own_k, keys.own_v) if len(keys.own_k) else (out, lse)


def attend_backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Keys, gradients: Keys, places: Places, scale: float
) -> Tensor:
    """Return the gradient of q; add those of the keys and values to `gradients`."""
    # A query without a root gives no gradient: its softmax is made 0.
    dense_lse = places.spread(lse).masked_fill_(places.empty, torch.inf)
    dense_d, dense_q, dense_out = (places.spread(x) for x in (d_out, q, out))
    dq, dk, dv = causal_backward(dense_d, dense_q, dense_out, dense_lse, keys.k0, keys.v0, places.segments, scale)
    gradients.k0.add_(dk)
    gradients.v0.add_(dv)
    dq = places.gather(dq)
    if len(keys.own_k) == 0:
        return dq
    return _fold_backward(dq, d_out, q, out, lse, scale, keys.own_k, keys.own_v, gradients.own_k, gradients.own_v)


@kernel_on_gpu
def _fold(q: Tensor, out: Tensor, lse: Tensor, scale: float, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Add own-column keys to a finished softmax."""
    grouped = q.float().unflatten(1, (keys.shape[2], -1))
    scores = (grouped * keys.float()[:, :, :, None]).sum(-1) * scale
    before = lse.view(scores.shape[1:])
    total = torch.logaddexp(before, scores.logsumexp(0))
    result = out.float().unflatten(1, (keys.shape[2], -1)) * (before - total).exp()[..., None]
    result += ((scores - total).exp()[..., None] * values.float()[:, :, :, None]).sum(0)
    return result.view(out.shape).to(out.dtype), total.view(lse.shape)


@kernel_on_gpu
def _fold_backward(
    dq: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    keys: Tensor,
    values: Tensor,
    d_keys: Tensor,
    d_values: Tensor,
) -> Tensor:
    """Return dq with the own-column part; add the gradients of own keys and values."""
    grouped, d_grouped = (x.float().unflatten(1, (keys.shape[2], -1)) for x in (q, d_out))
    delta = (d_out.float() * out.float()).sum(-1).view(grouped.shape[:-1])
    wide = keys.float()[:, :, :, None]
    weights = ((grouped * wide).sum(-1) * scale - lse.view(delta.shape)).exp()
    d_scores = weights * ((d_grouped * values.float()[:, :, :, None]).sum(-1) - delta) * scale
    d_keys.add_((d_scores[..., None] * grouped).sum(3))
    d_values.add_((weights[..., None] * d_grouped).sum(3))
    joint: Tensor = dq.float() + (d_scores[..., None] * wide).sum(0).view(dq.shape)
    return joint.to(dq.dtype)


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
