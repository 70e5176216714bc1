"""The roots' own keys of later steps, merged into the softmax over the keys of step 0 by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KeyValues(NamedTuple):
    """The keys and values that roots attend to, or their gradients."""

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

    def own(self, t: int, alive: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The own keys and values of step t > 0 alone, of the `alive[t]` roots of each step."""
        k, v = (x.split(alive[1:])[t - 1] for x in (self.own_k, self.own_v))
        return k, v


def scatter_to_slots(slots: Tensor, tensors: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> None:
    """Scatter tensors of n roots [n, ...] to their slots [N, ...]: queries, or also d_out, out and log-sum-exp."""
    if slots.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import scatter_to_slots as kernel

        kernel(slots, tensors, wide)
        return
    for x, goal in zip(tensors, wide, strict=True):
        goal[slots] = x


def merge_own_keys(
    q: Tensor, wide_out: Tensor, wide_lse: Tensor, slots: Tensor, keys: KeyValues, steps: int, scale: float, out: Tensor
) -> Tensor:
    """Gather the causal attention's output from the roots' slots [N, ...] and extend its softmax by the roots' own keys
    of some steps; write the output to `out` and return the log-sum-exp.
    """
    if q.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import merge_own_keys as kernel

        return kernel(q, wide_out, wide_lse, slots, keys, steps, scale, out)
    own = _own_rows(keys, steps, len(q))
    grouped = q.float().unflatten(1, (keys.own_k.shape[1], -1))
    scores = (grouped * keys.own_k[own].float()[:, :, :, None]).sum(-1) * scale
    before = wide_lse[slots].view(scores.shape[1:])
    total = torch.logaddexp(before, scores.logsumexp(0))
    result = wide_out[slots].float().unflatten(1, (keys.own_k.shape[1], -1)) * (before - total).exp()[..., None]
    result += ((scores - total).exp()[..., None] * keys.own_v[own].float()[:, :, :, None]).sum(0)
    out.copy_(result.flatten(1, 2))
    return total.flatten(1)


def merge_own_keys_backward(
    d_q: Tensor,
    wide_d_q: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    slots: Tensor,
    keys: KeyValues,
    gradients: KeyValues,
    steps: int,
    scale: float,
    seen: int,
) -> None:
    """Write to `d_q` the sum of what the roots' slots hold and of the part of their own keys. Add up the gradients of
    these keys and values, which exist already for the first `seen` roots; others hold arbitrary values.
    """
    if q.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import merge_own_keys_backward as kernel

        kernel(d_q, wide_d_q, d_out, q, out, lse, slots, keys, gradients, steps, scale, seen)
        return
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


def _own_rows(keys: KeyValues, steps: int, n: int) -> Tensor:
    """Rows of the own keys of n roots [steps, n]."""
    return (keys.starts[:steps, None] - keys.starts[0]) + torch.arange(n, device=keys.starts.device)
