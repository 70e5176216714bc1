"""The unroll over packed samples, forward and backward.

Notation (EAGLE-3, arXiv 2503.01840): x tokens, a[p] the target's auxiliary states at position p, g_t[p] the draft's
residual stream for the chain rooted at p after step t. Step t = 0..T-1 reads the token x[p+1+t] and predicts x[p+2+t]:

    g_{-1}[p] = fc(a[p])
    u         = concat(norm_in(E(x[p+1+t])), norm_h(g_{t-1}[p]))
    g_t[p]    = decoder layer over u on the residual stream g_{t-1}[p]
    h_t[p]    = norm_out(g_t[p]), read by lm_head

Shapes: C context positions and R roots of a row, n_t roots alive at step t, M their sum, H hidden size, A auxiliary
states.

Three things make the unroll cheap. Roots are sorted by lifetime, so the roots alive at step t are the first n_t rows
of every tensor. Beyond K_0 and V_0, nothing is computed at positions without a root. And the half of the q, k, v
projections that reads the token depends on the position p+1+t alone: it is computed once per position, not per step.

Backward is written out. All steps share weights, K_0, V_0 and token halves: autograd would make a gradient of each for
every step and add them up afterwards; here the gradient of a matrix is one product over all steps, and the others are
added up in place. What is cheap to compute again (norms, SwiGLU) is not kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3.draft.data.row import Row
from eagle3.draft.unroll.backward import aux_backward, backward
from eagle3.draft.unroll.forward import forward
from eagle3.draft.unroll.weights import Weights


def unroll(weights: Weights, row: Row, embedding: Tensor) -> Tensor:
    """Run all steps over one packed row.

    Backward adds the gradients of the weights to the parameters' `.grad` themselves.

    Args:
        weights: from `prepare`.
        row: samples and roots.
        embedding: [V, H], the target's.

    Returns:
        h_t of all steps [M, H], one step after the other (`split(row.alive)`), each in the row's root order.
    """
    dtype = weights.fc.value.dtype
    tokens, aux = embedding[row.next_tokens].to(dtype), row.aux.to(dtype)
    if not torch.is_grad_enabled():
        return forward(weights, row, tokens, aux, keep=False)[0]
    hidden: Tensor = _Unroll.apply(weights, row, weights.anchor, tokens, aux)  # type: ignore[no-untyped-call]
    return hidden


class _Unroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Weights, row: Row, _anchor: Tensor, tokens: Tensor, aux: Tensor) -> Tensor:
        hidden, ctx.activations = forward(weights, row, tokens, aux, keep=True)
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A pass has one backward, which frees what the forward kept.
        activations, ctx.activations = ctx.activations, None
        d_tokens, d_context = backward(activations, gradients[0])
        wanted = ctx.needs_input_grad[4] or activations.weights.fc_norm
        d_aux = aux_backward(activations, d_context) if wanted else None
        return None, None, None, d_tokens, d_aux
