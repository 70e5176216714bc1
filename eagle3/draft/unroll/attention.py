"""Attention of the unrolled draft: one causal kernel over step-0 keys, with the roots' own keys merged in.

At step t the query of root p sees the step-0 keys of positions j <= p of its sample and its own keys of steps 1..t:
one softmax over p+1+t keys. The first part is ordinary causal attention over packed samples; a fused kernel returns
its log-sum-exp. The second part, at most T-1 keys a root, is element-wise products.

Backward needs no gradient of the log-sum-exp: a flash kernel computes dS = P (dP - delta) from the *final* output and
log-sum-exp it is given, so with those of the joint softmax it returns the exact gradients of its part (ring attention
uses the same identity, arXiv 2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.draft.ops.causal_attention import causal_backward, causal_forward
from eagle3.draft.ops.flash import Segments
from eagle3.draft.ops.own_keys import KeyValues, merge_own_keys, merge_own_keys_backward, scatter_to_slots


class Attention:
    """Attention of all steps of a pass.

    The causal kernel has N queries, one for every slot, in position order; roots are sorted by lifetime. Some slots
    have no root that is alive, and those between two spans never have one: their queries are finite, their outputs
    are never read, and in backward their softmax is set to 0.
    """

    def __init__(self, keys: KeyValues, slots: Tensor, segments: Segments, scale: float) -> None:
        """Take what roots see, the slots of all of them [R], and the factor on the scores."""
        self.keys, self.slots, self.segments, self.scale = keys, slots, segments, scale
        self.buffers: tuple[Tensor, ...] = ()
        self.sums: list[Tensor] = []
        # Roots that backward has seen in a later step.
        self.seen = 0

    def forward(self, q: Tensor, t: int, out: Tensor) -> Tensor:
        """Attend from the n roots of step t, whose own keys of steps 1..t are already computed.

        Args:
            q: [n, Hq, d] queries, rotated.
            t: the step.
            out: [n, Hq, dv], where to put the output.

        Returns:
            log-sum-exp [n, Hq] in float32.
        """
        if not self.buffers:
            self.buffers = (q.new_zeros(self.segments.q[-1], *q.shape[1:]),)
        slots = self.slots[: len(q)]
        scatter_to_slots(slots, (q,), self.buffers)
        slot_out, slot_lse = causal_forward(self.buffers[0], self.keys.k0, self.keys.v0, self.segments, self.scale)
        return merge_own_keys(q, slot_out, slot_lse, slots, self.keys, t, self.scale, out)

    def backward(
        self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, t: int, gradients: KeyValues, d_q: Tensor
    ) -> None:
        """Write the gradient of q to `d_q`; add those of the keys and values to `gradients`.

        Call it for the last step first. The gradients of step-0 keys and values are complete, and written, at step 0.

        Args:
            d_out: [n, Hq, dv], gradient of the output.
            q: [n, Hq, d], as passed to `forward`.
            out: [n, Hq, dv], what `forward` wrote.
            lse: [n, Hq], what `forward` returned.
            t: the step.
            gradients: those of the keys and values, in buffers of their shapes.
            d_q: [n, Hq, d], where to put the gradient of q.
        """
        if len(self.buffers) == 1:
            # From here on, every earlier step only adds roots, so a slot without a root keeps a softmax of 0.
            N, shape = self.segments.q[-1], out.shape[1:]
            mass = lse.new_full((shape[0], N), torch.inf).mT
            self.buffers = (*self.buffers, *out.new_zeros(2, N, *shape), mass)
        slots = self.slots[: len(q)]
        scatter_to_slots(slots, (q, d_out, out, lse), self.buffers)
        slot_q, slot_d_out, slot_out, slot_lse = self.buffers
        k0, v0 = self.keys.k0, self.keys.v0
        slot_d_q, *found = causal_backward(slot_d_out, slot_q, slot_out, slot_lse, k0, v0, self.segments, self.scale)
        self.sums = [total.add_(x) for total, x in zip(self.sums, found, strict=True)] if self.sums else found
        if t == 0:
            gradients.k0.copy_(self.sums[0])
            gradients.v0.copy_(self.sums[1])
        merge_own_keys_backward(
            d_q, slot_d_q, d_out, q, out, lse, slots, self.keys, gradients, t, self.scale, self.seen
        )
        self.seen = len(q)
