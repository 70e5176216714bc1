"""Attention of the unrolled draft: one causal kernel over step-0 keys, own-column keys folded in.

At step t the query of root p sees the step-0 keys of positions j <= p of its sample and its own keys of steps 1..t:
one softmax over p+1+t keys. The first part is ordinary causal attention over packed samples; a fused kernel returns
its log-sum-exp. The second part, at most T-1 keys a root, is an element-wise product.

Backward needs no gradient of the log-sum-exp: a flash kernel computes dS = P (dP - delta) from the *final* output and
log-sum-exp it is given, so with those of the joint softmax it returns the exact gradients of its part (the identity
that ring attention rests on, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.accelerate import compiled_on_gpu

# Queries of one block of the plain implementation: bounds its score matrix.
BLOCK = 256


class Segments(NamedTuple):
    """Where the samples of a row stand among its queries and keys.

    Sample i has queries q[i] .. q[i+1]-1 and keys k[i] .. k[i+1]-1; its last query sees its last key (the causal
    mask is aligned at the end).
    """

    q: list[int]
    k: list[int]
    q_offsets: Tensor
    """the same as int32 on the device [samples+1]"""
    k_offsets: Tensor


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    slots: Tensor,
    segments: Segments,
    scale: float,
) -> Tensor:
    """Attend from n roots at step t.

    Args:
        q: [n, Hq, d] queries of step t, rotated.
        k0: [C, Hkv, d] keys of step 0 for all context positions, rotated.
        v0: [C, Hkv, dv] their values.
        own: t pairs of [n, Hkv, d] and [n, Hkv, dv]: the roots' own keys and values of steps 1..t.
        slots: [n] the roots' places among the row's queries.
        segments: the samples of the row.
        scale: factor on the scores.

    Returns:
        [n, Hq, dv]
    """
    flat = [tensor for pair in own for tensor in pair]
    out: Tensor = _UnrolledAttention.apply(  # type: ignore[no-untyped-call]
        segments, slots, scale, q, k0, v0, *flat
    )
    return out


class _UnrolledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, segments: Segments, slots: Tensor, scale: float, q: Tensor, k0: Tensor, v0: Tensor, *own: Tensor
    ) -> Tensor:
        dense = _scatter(q, slots, segments.q[-1])
        out, lse = causal_forward(dense, k0, v0, segments, scale)
        out, lse = out[slots], lse[slots]
        if own:
            out, lse = _fold(q, out, lse, scale, own[0::2], own[1::2])
        ctx.save_for_backward(q, k0, v0, out, lse, slots, *own)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k0, v0, out, lse, slots, *own = ctx.saved_tensors
        segments, scale = ctx.segments, ctx.scale
        d_out = gradients[0].contiguous()
        d_dense, q_dense, out_dense, lse_dense = (_scatter(x, slots, segments.q[-1]) for x in (d_out, q, out, lse))
        dq, dk0, dv0 = causal_backward(d_dense, q_dense, out_dense, lse_dense, k0, v0, segments, scale)
        dq = dq[slots]
        d_own: list[Tensor] = []
        if own:
            dq, d_own = _fold_backward(dq, d_out, q, out, lse, scale, own[0::2], own[1::2])
        return None, None, None, dq, dk0, dv0, *d_own


@compiled_on_gpu
def _fold(
    q: Tensor, out: Tensor, lse: Tensor, scale: float, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add own-column keys to a finished softmax: out [n, Hq, dv], lse [n, Hq] float32."""
    n, heads, _ = q.shape
    groups = keys[0].shape[1]
    grouped = q.float().unflatten(1, (groups, -1))
    scores = [(grouped * key.float()[:, :, None]).sum(-1).view(n, heads) * scale for key in keys]
    total = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
    result = out.float() * (lse - total).exp()[..., None]
    for score, value in zip(scores, values, strict=True):
        weight = (score - total).exp().unflatten(1, (groups, -1))
        result = result + (weight[..., None] * value.float()[:, :, None]).view_as(result)
    return result.to(out.dtype), total


@compiled_on_gpu
def _fold_backward(
    dq: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Add the own-column part to dq; return it and the gradients of keys and values, interleaved."""
    groups = keys[0].shape[1]
    grouped = q.float().unflatten(1, (groups, -1))
    d_grouped = d_out.float().unflatten(1, (groups, -1))
    delta = (d_out.float() * out.float()).sum(-1).unflatten(1, (groups, -1))
    total = lse.unflatten(1, (groups, -1))
    dq_grouped = dq.float().view_as(grouped)
    gradients: list[Tensor] = []
    for key, value in zip(keys, values, strict=True):
        weight = ((grouped * key.float()[:, :, None]).sum(-1) * scale - total).exp()
        d_score = weight * ((d_grouped * value.float()[:, :, None]).sum(-1) - delta) * scale
        dq_grouped = dq_grouped + d_score[..., None] * key.float()[:, :, None]
        gradients.append((d_score[..., None] * grouped).sum(2).to(key.dtype))
        gradients.append((weight[..., None] * d_grouped).sum(2).to(value.dtype))
    return dq_grouped.view_as(dq).to(dq.dtype), gradients


def causal_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention inside every segment.

    Returns:
        output [N, Hq, dv] and log-sum-exp [N, Hq] in float32.
    """
    if q.is_cuda:
        return _flash_forward(q, k, v, segments, scale)
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
        return _flash_backward(d_out, q, out, lse, k, v, segments, scale)
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
    blocks = []
    for sample in range(len(segments.q) - 1):
        first, end = segments.q[sample], segments.q[sample + 1]
        start, last = segments.k[sample], segments.k[sample + 1]
        for row in range(first, end, BLOCK):
            stop = min(row + BLOCK, end)
            visible = torch.arange(last - (end - row) + 1, last - (end - stop) + 1)
            keys = slice(start, int(visible[-1]))
            blocks.append((slice(row, stop), keys, torch.arange(start, keys.stop) >= visible[:, None]))
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


def _scatter(x: Tensor, slots: Tensor, size: int) -> Tensor:
    """Spread n roots over the row's queries; the others are 0 and get and give no gradient."""
    return x.new_zeros(size, *x.shape[1:]).index_copy_(0, slots, x)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, _pad(v, q), *_lengths(segments), 0.0, True, False, scale=scale
    )
    return out[..., : v.shape[2]], lse.mT.contiguous()


def _flash_backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout the kernel ignores its random state.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        _pad(d_out, q),
        q,
        k,
        _pad(v, q),
        _pad(out, q),
        lse.mT.contiguous(),
        *_lengths(segments),
        0.0,
        True,
        unused,
        unused,
        scale=scale,
    )
    return dq, dk, dv[..., : v.shape[2]]


def _lengths(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    longest_q = max(b - a for a, b in zip(segments.q, segments.q[1:], strict=False))
    longest_k = max(b - a for a, b in zip(segments.k, segments.k[1:], strict=False))
    return segments.q_offsets, segments.k_offsets, longest_q, longest_k


def _pad(x: Tensor, like: Tensor) -> Tensor:
    """The kernel wants one head size; MLA's values are narrower than its keys."""
    return torch.nn.functional.pad(x, (0, like.shape[2] - x.shape[2])).contiguous()
