"""The backward pass of the unroll, written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.ops.linear import input_backward, linear_backward, weight_backward
from eagle3.draft.ops.norm import norm, norm_backward
from eagle3.draft.ops.own_keys import KeyValues
from eagle3.draft.ops.rows import add_rows, sum_rows
from eagle3.draft.ops.swiglu import swiglu_backward
from eagle3.draft.unroll.forward import Activations, mixed_aux


@dataclass
class Gradients:
    """Gradients of what the steps share or keep, one step after the other [M, ...], and what products with them read.

    `_weights_backward` deletes those of the steps after their last use.
    """

    streams: Tensor
    """[M, H]: g_{t-1}, the input of every step"""
    d_results: Tensor
    """[M, H]: of g_t"""
    d_middle: Tensor
    """[M, H]: of the residual stream between attention and MLP"""
    activated: Tensor
    """[M, I]: the input of the down projection"""
    d_projected_context: Tensor
    """[C, K]: of `Activations.projected_context`"""
    d_projected: Tensor
    """[M, Q + K]: of `Activations.projected`"""
    keys: KeyValues


def backward(a: Activations, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of h_t [M, H] -> gradients of the tokens' embeddings [C, H] and of g_{-1} [C, H].

    Adds up the gradients of the weights. Overwrites and frees the activations.
    """
    w, eps = a.weights, a.weights.config.rms_norm_eps
    g = _start(a, d_hidden)
    d_stream = d_hidden.new_empty(0, d_hidden.shape[1])
    for t in reversed(range(len(a.row.alive))):
        d_result = a.at(t, g.d_results)
        d_result[: len(d_stream)].add_(d_stream)
        if w.config.norm_output:
            norm_backward(d_result, a.at(t, a.results), w.norm, eps, out=d_result)
        d_stream = _step_backward(a, g, t, d_result)
    _weights_backward(a, g)
    return _inputs_backward(a, g, d_stream)


def _start(a: Activations, d_hidden: Tensor) -> Gradients:
    """Allocate the gradients."""
    w, heads = a.weights, a.weights.projections
    streams = torch.cat([_stream(a, t) for t in range(len(a.row.alive))])
    d_projected_context, d_projected = torch.empty_like(a.projected_context), torch.empty_like(a.projected)
    # Roots have no keys of their own in step 0.
    a.split(a.at(0, d_projected))[1].zero_()
    keys = heads.key_values(d_projected_context, a.split(d_projected[a.row.alive[0] :])[1], a.row.starts[1:])
    if w.config.norm_output:
        d_results = d_hidden.clone()
    else:
        d_results = norm_backward(d_hidden, a.results, w.norm, w.config.rms_norm_eps)
    activated = a.tokens.new_empty(len(a.results), w.down.value.shape[1])
    return Gradients(
        streams=streams,
        d_results=d_results,
        d_middle=torch.empty_like(a.results),
        activated=activated,
        d_projected_context=d_projected_context,
        d_projected=d_projected,
        keys=keys,
    )


def _stream(a: Activations, t: int) -> Tensor:
    """g_{t-1}, which step t read [n, H]."""
    if t == 0:
        return a.context.index_select(0, a.roots)
    before = a.at(t - 1, a.results)[: a.row.alive[t]]
    return norm(before, a.weights.norm, a.weights.config.rms_norm_eps) if a.weights.config.norm_output else before


def _step_backward(a: Activations, g: Gradients, t: int, d_result: Tensor) -> Tensor:
    """Gradient of g_t [n, H] -> that of g_{t-1}; writes those of keys, values and projected tokens to `g`."""
    w, heads, eps = a.weights, a.weights.projections, a.weights.config.rms_norm_eps
    d_middle = _mlp_backward(a, g, t, d_result)
    attended, q = a.at(t, a.attended), a.queries.pop()
    d_attended = input_backward(d_middle, w.output).view_as(attended)
    projected, d_projected = a.at(t, a.projected), a.at(t, g.d_projected)
    (for_q, for_kv), (d_for_q, d_for_kv) = a.split(projected), a.split(d_projected)
    d_q = heads.query_buffer(d_for_q)
    a.attention.backward(d_attended, q, attended, a.lse.pop(), t, g.keys, d_q)
    heads.queries_backward(d_q, for_q, d_for_q, a.positions[t], a.rotary)
    stream = a.at(t, g.streams)
    if t > 0:
        d_own = g.keys.own(t, a.row.alive)
        heads.keys_backward(*d_own, for_kv, d_for_kv, a.positions[t], a.rotary)
        d_normed = input_backward(d_projected, heads.feature.whole)
    else:
        d_normed = input_backward(d_for_q, heads.feature.q)
    if w.config.norm_before_residual:
        return norm_backward(d_normed.add_(d_middle), stream, w.hidden_norm, eps)
    return norm_backward(d_normed, stream, w.hidden_norm, eps, d_middle)


def _mlp_backward(a: Activations, g: Gradients, t: int, d_result: Tensor) -> Tensor:
    w, gate_up, middle = a.weights, a.at(t, a.gate_up), a.at(t, a.middle)
    swiglu_backward(input_backward(d_result, w.down, a.at(t, g.activated)), gate_up)
    d_normed = input_backward(gate_up, w.gate_up)
    return norm_backward(d_normed, middle, w.post_norm, w.config.rms_norm_eps, d_result, a.at(t, g.d_middle))


def _weights_backward(a: Activations, g: Gradients) -> None:
    """Add up the gradients of the matrices that every step reads; free what only they need."""
    w, feature, first = a.weights, a.weights.projections.feature, a.row.alive[0]
    weight_backward(g.d_results, g.activated, w.down)
    del g.d_results, g.activated
    # `gate_up` holds its gradient by now.
    weight_backward(a.gate_up, norm(a.middle, w.post_norm, w.config.rms_norm_eps), w.gate_up)
    del a.gate_up, a.middle
    weight_backward(g.d_middle, a.attended.flatten(1), w.output)
    del g.d_middle, a.attended
    normed = norm(g.streams, w.hidden_norm, w.config.rms_norm_eps)
    weight_backward(a.split(g.d_projected[:first])[0], normed[:first], feature.q)
    if len(a.row.alive) > 1:
        weight_backward(g.d_projected[first:], normed[first:], feature.whole)


def _inputs_backward(a: Activations, g: Gradients, d_stream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the roots' g_{-1} [R, H], and those in `g` -> gradients of the inputs."""
    w, row, heads, eps = a.weights, a.row, a.weights.projections, a.weights.config.rms_norm_eps
    heads.keys_backward(g.keys.k0, g.keys.v0, a.projected_context, g.d_projected_context, row.positions, a.rotary)
    normed = norm(a.context, w.hidden_norm, eps)
    d_normed = linear_backward(g.d_projected_context, normed, heads.feature.kv)
    d_context = norm_backward(d_normed, a.context, w.hidden_norm, eps)
    add_rows(d_context, a.roots, d_stream)
    weight_backward(d_context, mixed_aux(w, a.aux), w.fc)
    normed_tokens = norm(a.tokens, w.input_norm, eps)
    d_q, d_kv = a.split(sum_rows(g.d_projected, row.pairs, row.pair_offsets))
    add_rows(g.d_projected_context, row.root_context, d_kv)
    d_tokens = linear_backward(g.d_projected_context, normed_tokens, heads.token.kv)
    d_roots = linear_backward(d_q, normed_tokens.index_select(0, row.root_context), heads.token.q)
    add_rows(d_tokens, row.root_context, d_roots)
    return norm_backward(d_tokens, a.tokens, w.input_norm, eps), d_context


def aux_backward(a: Activations, d_context: Tensor) -> Tensor:
    """Gradient of g_{-1} [C, H] -> of the auxiliary states [C, A, H]."""
    w = a.weights
    d_mixed = input_backward(d_context, w.fc)
    if not w.fc_norm:
        return d_mixed.view_as(a.aux)
    parts = zip(d_mixed.view_as(a.aux).unbind(1), a.aux.unbind(1), w.fc_norm, strict=True)
    return torch.stack([norm_backward(d, part, weight, w.config.rms_norm_eps) for d, part, weight in parts], 1)
