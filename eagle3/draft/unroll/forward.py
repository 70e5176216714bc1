"""The forward pass of the unroll."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.data.row import Row
from eagle3.draft.ops.linear import add_linear, linear
from eagle3.draft.ops.norm import norm
from eagle3.draft.ops.rope import Rotary
from eagle3.draft.ops.swiglu import swiglu
from eagle3.draft.unroll.attention import Attention
from eagle3.draft.unroll.projections import Projections
from eagle3.draft.unroll.rotary import rotary
from eagle3.draft.unroll.weights import Weights


@dataclass
class Activations:
    """What the forward pass computes and backward reads.

    Tensors of all steps hold one step after the other [M, ...], so that the gradient of a weight is one product over
    all of them. Backward deletes each after its last use, and overwrites some with gradients. Without a backward,
    those marked (*) hold one step only [n_0, ...], and the lists stay empty.

    Shapes as in `eagle3.draft.unroll.unroll`; Hq heads of size d (values: dv), I the MLP's size, Q and K as in
    `eagle3.draft.unroll.projections`.
    """

    weights: Weights
    row: Row
    tokens: Tensor
    """[C, H], embeddings"""
    aux: Tensor
    """[C, A, H]"""
    roots: Tensor
    """[R] int64: the roots' context positions, in root order"""
    positions: tuple[Tensor, ...]
    """of each step [n_t]: root p at step t is rotated as position p+t"""
    rotary: Rotary
    context: Tensor
    """[C, H]: g_{-1}"""
    projected_context: Tensor
    """[C, K]: what becomes keys and values of step 0"""
    projected: Tensor
    """[M, Q + K]: what becomes the roots' queries, and their own keys and values"""
    attention: Attention
    attended: Tensor
    """[M, Hq, dv] (*): the attention's output"""
    middle: Tensor
    """[M, H] (*): the residual stream between attention and MLP"""
    gate_up: Tensor
    """[M, 2I] (*)"""
    results: Tensor
    """[M, H]: g_t"""
    queries: list[Tensor]
    """of each step [n_t, Hq, d]"""
    lse: list[Tensor]
    """of each step [n_t, Hq]: the attention's log-sum-exp"""

    def at(self, t: int, buffer: Tensor) -> Tensor:
        """The part of step t [n, ...] of a buffer for all steps, or for one."""
        n, edge = self.row.alive[t], sum(self.row.alive[:t])
        return buffer[edge : edge + n] if len(buffer) == sum(self.row.alive) else buffer[:n]

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The columns for queries, and those for keys and values."""
        return split_columns(projected, self.weights.projections)


def split_columns(projected: Tensor, heads: Projections) -> tuple[Tensor, Tensor]:
    """Split [n, Q + K] into the columns for queries, and those for keys and values."""
    queries = len(heads.token.q.value)
    return projected[:, :queries], projected[:, queries:]


def forward(weights: Weights, row: Row, tokens: Tensor, aux: Tensor, *, keep: bool) -> tuple[Tensor, Activations]:
    """Return h_t of all steps [M, H], and what backward reads.

    Args:
        weights: from `prepare`.
        row: samples and roots.
        tokens: embeddings [C, H].
        aux: auxiliary states [C, A, H].
        keep: keep what backward needs.
    """
    w, eps = weights, weights.config.rms_norm_eps
    a = _start(weights, row, tokens, aux, keep)
    stream = a.context.index_select(0, a.roots)
    for t, n in enumerate(row.alive):
        result = _step(a, t, stream[:n], keep)
        stream = norm(result, w.norm, eps) if w.config.norm_output else result
    return norm(a.results, w.norm, eps), a


def _start(w: Weights, row: Row, tokens: Tensor, aux: Tensor, keep: bool) -> Activations:
    """Project the tokens for all steps, and compute the keys and values of step 0."""
    heads, eps = w.projections, w.config.rms_norm_eps
    roots = row.root_context[row.order]
    positions = row.positions[row.root_context[row.ahead]].split(row.alive)
    rotations = rotary(w.config, row.segments.longest[1], tokens.device)
    every = sum(row.alive)
    some = every if keep else row.alive[0]
    results, middle = tokens.new_empty(every, w.config.hidden_size), tokens.new_empty(some, w.config.hidden_size)
    gate_up = tokens.new_empty(some, len(w.gate_up.value))
    context = linear(mixed_aux(w, aux), w.fc)
    normed = norm(tokens, w.input_norm, eps)
    projected_context = linear(normed, heads.token.kv)
    # Token p+1+t of root p is at context position p+t, which is a root, too.
    q = linear(normed.index_select(0, row.root_context), heads.token.q)
    of_roots = torch.cat([q, projected_context.index_select(0, row.root_context)], 1)
    projected = of_roots.index_select(0, row.ahead)
    add_linear(projected_context, norm(context, w.hidden_norm, eps), heads.feature.kv)
    keys = heads.key_values(projected_context, split_columns(projected[row.alive[0] :], heads)[1], row.starts[1:])
    heads.keys(projected_context, keys.k0, keys.v0, row.positions, rotations)
    return Activations(
        weights=w,
        row=row,
        tokens=tokens,
        aux=aux,
        roots=roots,
        positions=positions,
        rotary=rotations,
        context=context,
        projected_context=projected_context,
        projected=projected,
        attention=Attention(keys, row.slots, row.segments, heads.scale),
        attended=tokens.new_empty(some, w.config.num_attention_heads, keys.v0.shape[2]),
        middle=middle,
        gate_up=gate_up,
        results=results,
        queries=[],
        lse=[],
    )


def _step(a: Activations, t: int, stream: Tensor, keep: bool) -> Tensor:
    """g_{t-1} [n, H] -> g_t [n, H]."""
    w, heads, eps = a.weights, a.weights.projections, a.weights.config.rms_norm_eps
    normed = norm(stream, w.hidden_norm, eps)
    projected = a.at(t, a.projected)
    for_q, for_kv = a.split(projected)
    if t > 0:
        add_linear(projected, normed, heads.feature.whole)
        heads.keys(for_kv, *a.attention.keys.own(t, a.row.alive), a.positions[t], a.rotary)
    else:
        add_linear(for_q, normed, heads.feature.q)
    q = heads.queries(for_q, a.positions[t], a.rotary)
    attended = a.at(t, a.attended)
    lse = a.attention.forward(q, t, attended)
    if keep:
        a.queries.append(q)
        a.lse.append(lse)
    residual = normed if w.config.norm_before_residual else stream
    middle = linear(attended.flatten(1), w.output, residual, a.at(t, a.middle))
    gate_up = linear(norm(middle, w.post_norm, eps), w.gate_up, out=a.at(t, a.gate_up))
    return linear(swiglu(gate_up), w.down, middle, a.at(t, a.results))


def mixed_aux(w: Weights, aux: Tensor) -> Tensor:
    """Return what fc reads of auxiliary states [C, A, H]: [C, A*H]."""
    normed = [norm(part, weight, w.config.rms_norm_eps) for part, weight in zip(aux.unbind(1), w.fc_norm, strict=False)]
    return torch.cat(normed, 1) if normed else aux.flatten(1)
