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
of every tensor. Beyond K_0 and V_0, nothing is computed where no root stands. And the half of the q, k, v projections
that reads the token depends on the position p+1+t alone: it is computed once per position, not once per step.

Backward is written out. All steps share weights, K_0, V_0 and token halves: autograd would make a gradient of each for
every step and add them up afterwards; here the gradient of a matrix is one product over all steps, and the others are
added up in place. What is cheap to compute again (norms, SwiGLU) is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from eagle3.draft.data.row import Row
from eagle3.draft.model.config import DraftConfig
from eagle3.draft.model.network import Draft, Layer, Norm
from eagle3.draft.ops.dispatch import kernel_on_gpu
from eagle3.draft.ops.layer import (
    Weight,
    add_linear,
    add_rows,
    input_backward,
    linear,
    linear_backward,
    norm,
    norm_backward,
    swiglu,
    swiglu_backward,
    weight_backward,
)
from eagle3.draft.ops.rope import rotary
from eagle3.draft.unroll.attention import Attention, Keys
from eagle3.draft.unroll.projections import GroupedProjections, LatentProjections, Projections


class Weights(NamedTuple):
    """The weights in compute dtype, merged into as few matrices as a pass needs."""

    config: DraftConfig
    anchor: Tensor
    """a parameter: tells autograd that outputs depend on the weights, whose gradients it does not see"""
    fc: Weight
    """[H, A*H]"""
    fc_norm: tuple[Weight, ...]
    input_norm: Weight
    hidden_norm: Weight
    projections: Projections
    output: Weight
    """[H, Hq*dv], o_proj"""
    post_norm: Weight
    gate_up: Weight
    """[2I, H]"""
    down: Weight
    norm: Weight
    lm_head: Weight
    """[Vd, H]"""


def prepare(draft: Draft, dtype: torch.dtype, *, float8: bool = False) -> Weights:
    """Cast and merge the weights, once per pass: every step of the unroll reads the same ones.

    Args:
        draft: the float32 masters.
        dtype: what the pass computes in.
        float8: compute the products of `fc` and the layer in float8 (`eagle3.draft.ops.float8`). lm_head stays in
            `dtype`: errors of the logits enter the loss directly, and their gradients, tiny but for a few tokens of
            the vocabulary, do not fit float8's range.
    """
    layer = cast(Layer, draft.layers[0])
    fc_norm = cast(Iterable[Norm], draft.fc_norm) if draft.config.fc_norm else ()
    projections = LatentProjections if draft.config.latent else GroupedProjections
    weights = Weights(
        config=draft.config,
        anchor=draft.fc.weight,
        fc=Weight.of(dtype, draft.fc.weight),
        fc_norm=tuple(Weight.of(dtype, part.weight) for part in fc_norm),
        input_norm=Weight.of(dtype, layer.input_layernorm.weight),
        hidden_norm=Weight.of(dtype, layer.hidden_norm.weight),
        projections=projections.prepare(draft.config, layer.self_attn, dtype),
        output=Weight.of(dtype, layer.self_attn.o_proj.weight),
        post_norm=Weight.of(dtype, layer.post_attention_layernorm.weight),
        gate_up=Weight.of(dtype, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
        down=Weight.of(dtype, layer.mlp.down_proj.weight),
        norm=Weight.of(dtype, draft.norm.weight),
        lm_head=Weight.of(dtype, draft.lm_head.weight),
    )
    if not float8:
        return weights
    return weights._replace(
        fc=weights.fc.in_float8(),
        projections=weights.projections.in_float8(),
        output=weights.output.in_float8(),
        gate_up=weights.gate_up.in_float8(),
        down=weights.down.in_float8(),
    )


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
        return _Pass(weights, row, tokens, aux, keep=False).forward()
    hidden: Tensor = _Unroll.apply(weights, row, weights.anchor, tokens, aux)  # type: ignore[no-untyped-call]
    return hidden


class _Unroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Weights, row: Row, _anchor: Tensor, tokens: Tensor, aux: Tensor) -> Tensor:
        ctx.run = _Pass(weights, row, tokens, aux, keep=True)
        hidden: Tensor = ctx.run.forward()
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A pass has one backward, which frees what the forward kept.
        run, ctx.run = ctx.run, None
        d_tokens, d_context = run.backward(gradients[0])
        d_aux = run.aux_backward(d_context) if ctx.needs_input_grad[4] or run.weights.fc_norm else None
        return None, None, None, d_tokens, d_aux


class _Pass:
    """One forward and at most one backward over a row.

    What backward needs of the steps lies together, one step after the other [M, ...], so that the gradient of a weight
    is one product over all of them. Backward puts gradients where it has read the last of what was there.
    """

    def __init__(self, weights: Weights, row: Row, tokens: Tensor, aux: Tensor, *, keep: bool) -> None:
        """Take tokens' embeddings [C, H] and auxiliary states [C, A, H]; `keep` what backward needs."""
        self.weights, self.row, self.tokens, self.aux, self.keep = weights, row, tokens, aux, keep
        self.heads, self.eps = weights.projections, weights.config.rms_norm_eps
        self.roots = row.root_context[row.ranks]
        # Root p at step t is rotated as position p+t.
        self.positions = row.positions[row.root_context[row.ahead]].split(row.alive)
        self.rotary = rotary(weights.config, row.segments.longest[1], tokens.device)
        self.results = self._steps(weights.config.hidden_size)
        room = self._steps if keep else self._once
        # g_t with the attention's part alone.
        self.middle, self.gate_up = room(weights.config.hidden_size), room(len(weights.gate_up.value))
        self.queries: list[Tensor] = []
        self.lse: list[Tensor] = []

    def _steps(self, *shape: int) -> Tensor:
        """Room for all steps [M, ...]."""
        return self.tokens.new_empty(sum(self.row.alive), *shape)

    def _once(self, *shape: int) -> Tensor:
        """Room for one step."""
        return self.tokens.new_empty(self.row.alive[0], *shape)

    def _at(self, t: int, room: Tensor) -> Tensor:
        """The part of step t [n, ...] of room for all steps, or for one."""
        n, edge = self.row.alive[t], sum(self.row.alive[:t])
        return room[edge : edge + n] if len(room) == len(self.results) else room[:n]

    def forward(self) -> Tensor:
        """Return h_t of all steps [M, H]."""
        w, row = self.weights, self.row
        self.context = linear(self._mixed(), w.fc)
        self._start()
        stream = self.context.index_select(0, self.roots)
        for t, n in enumerate(row.alive):
            result = self._step(t, stream[:n])
            stream = norm(result, w.norm, self.eps) if w.config.norm_output else result
        return norm(self.results, w.norm, self.eps)

    def _start(self) -> None:
        """Project the tokens for all steps, and make the keys and values of step 0."""
        w, row, heads = self.weights, self.row, self.heads
        entering = norm(self.tokens, w.input_norm, self.eps)
        self.projected0 = linear(entering, heads.token.kv)
        # Token p+1+t of root p stands at context position p+t, which is a root, too.
        q = linear(entering.index_select(0, row.root_context), heads.token.q)
        entered = torch.cat([q, self.projected0.index_select(0, row.root_context)], 1)
        self.projected = entered.index_select(0, row.ahead)
        add_linear(self.projected0, norm(self.context, w.hidden_norm, self.eps), heads.feature.kv)
        keys = self._room(self.projected0, self.projected)
        heads.keys(self.projected0, keys.k0, keys.v0, row.positions, self.rotary)
        self.attention = Attention(keys, row.slots, row.segments, heads.scale)
        shape = w.config.num_attention_heads, keys.v0.shape[2]
        self.attended = self._steps(*shape) if self.keep else self._once(*shape)

    def _room(self, projected0: Tensor, projected: Tensor) -> Keys:
        """Where keys and values go, or their gradients; roots have none of their own in step 0."""
        own = self._halves(projected[self.row.alive[0] :])[1]
        return Keys(*self.heads.key_room(projected0), *self.heads.key_room(own), self.row.starts[1:])

    def _own(self, keys: Keys, t: int) -> tuple[Tensor, Tensor]:
        """The roots' own keys and values of step t > 0 alone."""
        k, v = (x.split(self.row.alive[1:])[t - 1] for x in (keys.own_k, keys.own_v))
        return k, v

    def _step(self, t: int, stream: Tensor) -> Tensor:
        """g_{t-1} [n, H] -> g_t."""
        w, heads = self.weights, self.heads
        normed = norm(stream, w.hidden_norm, self.eps)
        projected = self._at(t, self.projected)
        for_q, for_kv = self._halves(projected)
        if t > 0:
            add_linear(projected, normed, heads.feature.whole)
            heads.keys(for_kv, *self._own(self.attention.keys, t), self.positions[t], self.rotary)
        else:
            add_linear(for_q, normed, heads.feature.q)
        q = heads.queries(for_q, self.positions[t], self.rotary)
        attended = self._at(t, self.attended)
        lse = self.attention.forward(q, t, attended)
        if self.keep:
            self.queries.append(q)
            self.lse.append(lse)
        residual = normed if w.config.norm_before_residual else stream
        middle = linear(attended.flatten(1), w.output, residual, self._at(t, self.middle))
        gate_up = linear(norm(middle, w.post_norm, self.eps), w.gate_up, out=self._at(t, self.gate_up))
        return linear(swiglu(gate_up), w.down, middle, self._at(t, self.results))

    def backward(self, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the outputs [M, H] -> gradients of the tokens' embeddings [C, H] and of g_{-1} [C, H]."""
        w, row = self.weights, self.row
        # The input of every step.
        self.streams = torch.cat([self._stream(t) for t in range(len(row.alive))])
        self.d_projected0, self.d_projected = torch.empty_like(self.projected0), torch.empty_like(self.projected)
        self._halves(self._at(0, self.d_projected))[1].zero_()
        self.gradients = self._room(self.d_projected0, self.d_projected)
        if w.config.norm_output:
            self.d_results = d_hidden.clone()
        else:
            self.d_results = norm_backward(d_hidden, self.results, w.norm, self.eps)
        self.d_middle, self.activated = self._steps(self.results.shape[1]), self._steps(w.down.value.shape[1])
        d_stream = d_hidden.new_empty(0, d_hidden.shape[1])
        for t in reversed(range(len(row.alive))):
            d_result = self._at(t, self.d_results)
            d_result[: len(d_stream)].add_(d_stream)
            if w.config.norm_output:
                norm_backward(d_result, self._at(t, self.results), w.norm, self.eps, out=d_result)
            d_stream = self._step_backward(t, d_result)
        self._weights_backward()
        return self._start_backward(d_stream)

    def _step_backward(self, t: int, d_result: Tensor) -> Tensor:
        """Gradient of g_t [n, H] -> that of g_{t-1}; those of keys, values and projected tokens stay in the pass."""
        w, heads = self.weights, self.heads
        d_middle = self._mlp_backward(t, d_result)
        attended, q = self._at(t, self.attended), self.queries.pop()
        d_attended = input_backward(d_middle, w.output).view_as(attended)
        projected, d_projected = self._at(t, self.projected), self._at(t, self.d_projected)
        (for_q, for_kv), (d_for_q, d_for_kv) = self._halves(projected), self._halves(d_projected)
        d_q = heads.query_room(d_for_q)
        self.attention.backward(d_attended, q, attended, self.lse.pop(), t, self.gradients, d_q)
        heads.queries_backward(d_q, for_q, d_for_q, self.positions[t], self.rotary)
        stream = self._at(t, self.streams)
        if t > 0:
            d_own = self._own(self.gradients, t)
            heads.keys_backward(*d_own, for_kv, d_for_kv, self.positions[t], self.rotary)
            d_normed = input_backward(d_projected, heads.feature.whole)
        else:
            d_normed = input_backward(d_for_q, heads.feature.q)
        if w.config.norm_before_residual:
            return norm_backward(d_normed.add_(d_middle), stream, w.hidden_norm, self.eps)
        return norm_backward(d_normed, stream, w.hidden_norm, self.eps, d_middle)

    def _stream(self, t: int) -> Tensor:
        """What step t read [n, H]."""
        if t == 0:
            return self.context.index_select(0, self.roots)
        before = self._at(t - 1, self.results)[: self.row.alive[t]]
        return norm(before, self.weights.norm, self.eps) if self.weights.config.norm_output else before

    def _mlp_backward(self, t: int, d_result: Tensor) -> Tensor:
        w, gate_up, middle = self.weights, self._at(t, self.gate_up), self._at(t, self.middle)
        swiglu_backward(input_backward(d_result, w.down, self._at(t, self.activated)), gate_up)
        d_normed = input_backward(gate_up, w.gate_up)
        return norm_backward(d_normed, middle, w.post_norm, self.eps, d_result, self._at(t, self.d_middle))

    def _weights_backward(self) -> None:
        """The gradients of the matrices that every step reads."""
        w, feature, first = self.weights, self.heads.feature, self.row.alive[0]
        weight_backward(self.d_results, self.activated, w.down)
        del self.d_results, self.activated
        weight_backward(self.gate_up, norm(self.middle, w.post_norm, self.eps), w.gate_up)
        del self.gate_up, self.middle
        weight_backward(self.d_middle, self.attended.flatten(1), w.output)
        del self.d_middle, self.attended
        normed = norm(self.streams, w.hidden_norm, self.eps)
        weight_backward(self._halves(self.d_projected[:first])[0], normed[:first], feature.q)
        if len(self.row.alive) > 1:
            weight_backward(self.d_projected[first:], normed[first:], feature.whole)

    def _start_backward(self, d_stream: Tensor) -> tuple[Tensor, Tensor]:
        """Go back from the gradient of the roots' g_{-1} [R, H], and those in the pass, to the inputs."""
        w, row, heads, gradients = self.weights, self.row, self.heads, self.gradients
        heads.keys_backward(gradients.k0, gradients.v0, self.projected0, self.d_projected0, row.positions, self.rotary)
        normed = norm(self.context, w.hidden_norm, self.eps)
        d_normed = linear_backward(self.d_projected0, normed, heads.feature.kv)
        d_context = norm_backward(d_normed, self.context, w.hidden_norm, self.eps)
        add_rows(d_context, self.roots, d_stream)
        weight_backward(d_context, self._mixed(), w.fc)
        entering = norm(self.tokens, w.input_norm, self.eps)
        d_q, d_kv = self._halves(_sum_rows(self.d_projected, row.pairs, row.pair_offsets))
        add_rows(self.d_projected0, row.root_context, d_kv)
        d_entering = linear_backward(self.d_projected0, entering, heads.token.kv)
        d_roots = linear_backward(d_q, entering.index_select(0, row.root_context), heads.token.q)
        add_rows(d_entering, row.root_context, d_roots)
        return norm_backward(d_entering, self.tokens, w.input_norm, self.eps), d_context

    def _mixed(self) -> Tensor:
        """What fc reads [C, A*H]."""
        parts = zip(self.aux.unbind(1), self.weights.fc_norm, strict=False)
        normed = [norm(part, weight, self.eps) for part, weight in parts]
        return torch.cat(normed, 1) if normed else self.aux.flatten(1)

    def aux_backward(self, d_context: Tensor) -> Tensor:
        """Gradient of g_{-1} [C, H] -> of the auxiliary states [C, A, H]."""
        d_mixed = input_backward(d_context, self.weights.fc)
        if not self.weights.fc_norm:
            return d_mixed.view_as(self.aux)
        parts = zip(d_mixed.view_as(self.aux).unbind(1), self.aux.unbind(1), self.weights.fc_norm, strict=True)
        return torch.stack([norm_backward(d, part, weight, self.eps) for d, part, weight in parts], 1)

    def _halves(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The columns for queries, and those for keys and values."""
        queries = len(self.heads.token.q.value)
        return projected[:, :queries], projected[:, queries:]


@kernel_on_gpu
def _sum_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum x[rows[offsets[i] : offsets[i+1]]] for every i."""
    return functional.embedding_bag(rows, x, offsets, mode="sum", include_last_offset=True)
