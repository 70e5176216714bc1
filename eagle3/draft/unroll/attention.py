"""Attention of the unrolled draft: one causal kernel over step-0 keys, own-column keys folded in.

At step t the query of root p sees the step-0 keys of positions j <= p of its sample and its own keys of steps 1..t:
one softmax over p+1+t keys. The first part is ordinary causal attention over packed samples; a fused kernel returns
its log-sum-exp. The second part, at most T-1 keys a root, is an element-wise product.

Backward needs no gradient of the log-sum-exp: a flash kernel computes dS = P (dP - delta) from the *final* output and
log-sum-exp it is given, so with those of the joint softmax it returns the exact gradients of its part (the identity
that ring attention rests on, arXiv 2310.01889).
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
    are never read, and in backward their softmax is made 0.
    """

    def __init__(self, keys: KeyValues, slots: Tensor, segments: Segments, scale: float) -> None:
        """Take what roots see, the slots of all of them [R], and the factor on the scores."""
        self.keys, self.slots, self.segments, self.scale = keys, slots, segments, scale
        self.wide: tuple[Tensor, ...] = ()
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
        if not self.wide:
            self.wide = (q.new_zeros(self.segments.q[-1], *q.shape[1:]),)
        slots = self.slots[: len(q)]
        scatter_to_slots(slots, (q,), self.wide)
        wide_out, wide_lse = causal_forward(self.wide[0], self.keys.k0, self.keys.v0, self.segments, self.scale)
        return merge_own_keys(q, wide_out, wide_lse, slots, self.keys, t, self.scale, out)

    def backward(
        self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, t: int, gradients: KeyValues, d_q: Tensor
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
        scatter_to_slots(slots, (q, d_out, out, lse), self.wide)
        wide_q, wide_d, wide_out, wide_lse = self.wide
        k0, v0 = self.keys.k0, self.keys.v0
        wide_d_q, *found = causal_backward(wide_d, wide_q, wide_out, wide_lse, k0, v0, self.segments, self.scale)
        self.sums = [total.add_(x) for total, x in zip(self.sums, found, strict=True)] if self.sums else found
        if t == 0:
            gradients.k0.copy_(self.sums[0])
            gradients.v0.copy_(self.sums[1])
        merge_own_keys_backward(
            d_q, wide_d_q, d_out, q, out, lse, slots, self.keys, gradients, t, self.scale, self.seen
        )
        self.seen = len(q)
