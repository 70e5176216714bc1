"""Causal attention over packed samples that returns its log-sum-exp: fused on a GPU, in blocks of queries elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.draft.ops.flash import Segments, flash_backward, flash_forward

# Queries of one block: bounds the score matrix.
BLOCK = 256


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
