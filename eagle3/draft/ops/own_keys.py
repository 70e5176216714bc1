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
    """[steps] int64: where the own keys of each step start; only differences matter"""

    def own(self, t: int, alive: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The own keys and values of step t > 0 alone, of the `alive[t]` roots of each step."""
        k, v = (x.split(alive[1:])[t - 1] for x in (self.own_k, self.own_v))
        return k, v


def scatter_to_slots(slots: Tensor, tensors: tuple[Tensor, ...], buffers: tuple[Tensor, ...]) -> None:
    """Scatter tensors of n roots [n, ...] to their slots [N, ...]: queries, or also d_out, out and log-sum-exp."""
    if slots.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import scatter_to_slots as kernel

        kernel(slots, tensors, buffers)
        return
    for x, buffer in zip(tensors, buffers, strict=True):
        buffer[slots] = x


def merge_own_keys(
    q: Tensor, slot_out: Tensor, slot_lse: Tensor, slots: Tensor, keys: KeyValues, steps: int, scale: float, out: Tensor
) -> Tensor:
    """Gather the causal attention's output from the roots' slots and extend its softmax by the roots' own keys.

    Args:
        q: [n, Hq, d] queries.
        slot_out: [N, Hq, dv], the causal attention's output.
        slot_lse: [N, Hq], its log-sum-exp.
        slots: [n], the roots' slots.
        keys: the own keys and values.
        steps: how many steps of own keys there are.
        scale: the factor on the scores.
        out: [n, Hq, dv], where to put the output.

    Returns:
        log-sum-exp [n, Hq] in float32.
    """
    if q.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import merge_own_keys as kernel

        return kernel(q, slot_out, slot_lse, slots, keys, steps, scale, out)
    own = _own_rows(keys, steps, len(q))
    grouped = q.float().unflatten(1, (keys.own_k.shape[1], -1))
    scores = (grouped * keys.own_k[own].float()[:, :, :, None]).sum(-1) * scale
    before = slot_lse[slots].view(scores.shape[1:])
    total = torch.logaddexp(before, scores.logsumexp(0))
    result = slot_out[slots].float().unflatten(1, (keys.own_k.shape[1], -1)) * (before - total).exp()[..., None]
    result += ((scores - total).exp()[..., None] * keys.own_v[own].float()[:, :, :, None]).sum(0)
    out.copy_(result.flatten(1, 2))
    return total.flatten(1)


def merge_own_keys_backward(
    d_q: Tensor,
    slot_d_q: Tensor,
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
    """Write the gradient of q [n, Hq, d] to `d_q`: that of the causal attention, `slot_d_q` [N, Hq, d], at the roots'
    slots, plus that of the own keys. Add the gradients of the own keys and values to `gradients`, where those of the
    first `seen` roots exist already and the others hold arbitrary values.
    """
    if q.is_cuda:
        from eagle3.draft.ops.own_keys_kernel import merge_own_keys_backward as kernel

        kernel(d_q, slot_d_q, d_out, q, out, lse, slots, keys, gradients, steps, scale, seen)
        return
    own = _own_rows(keys, steps, len(q))
    grouped, d_grouped = (x.float().unflatten(1, (keys.own_k.shape[1], -1)) for x in (q, d_out))
    delta = (d_out.float() * out.float()).sum(-1).view(grouped.shape[:-1])
    own_k = keys.own_k[own].float()[:, :, :, None]
    weights = ((grouped * own_k).sum(-1) * scale - lse.view(delta.shape)).exp()
    d_scores = weights * ((d_grouped * keys.own_v[own].float()[:, :, :, None]).sum(-1) - delta) * scale
    gradients.own_k[own[:, seen:]] = 0
    gradients.own_v[own[:, seen:]] = 0
    gradients.own_k[own] += (d_scores[..., None] * grouped).sum(3)
    gradients.own_v[own] += (weights[..., None] * d_grouped).sum(3)
    d_q.copy_(slot_d_q[slots].float() + (d_scores[..., None] * own_k).sum(0).flatten(1, 2))


def _own_rows(keys: KeyValues, steps: int, n: int) -> Tensor:
    """Rows of the own keys of n roots [steps, n]."""
    return (keys.starts[:steps, None] - keys.starts[0]) + torch.arange(n, device=keys.starts.device)
