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
every step and add them up afterwards; here they are added up in place. And what is cheap to compute again (norms,
SwiGLU) is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from eagle3.draft.accelerate import kernel_on_gpu
from eagle3.draft.attention import Keys, Places, attend, attend_backward
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Draft, Layer, Norm
from eagle3.draft.projections import GroupedProjections, LatentProjections, Projections
from eagle3.draft.rope import rotary
from eagle3.draft.rows import Row
from eagle3.draft.weights import (
    Weight,
    input_backward,
    linear,
    linear_backward,
    norm,
    norm_backward,
    swiglu,
    swiglu_backward,
    weight_backward,
)


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
        float8: compute the products of `fc` and the layer in float8 (`eagle3.draft.float8`). lm_head stays in
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


class _Step(NamedTuple):
    """What backward needs of one step."""

    stream: Tensor
    """[n, H] g_{t-1}, likewise g_t with the attention's part alone, and g_t"""
    middle: Tensor
    result: Tensor
    q: Tensor
    attended: Tensor
    """[n, Hq, dv], and its log-sum-exp [n, Hq]"""
    lse: Tensor
    gate_up: Tensor
    saved: tuple[Any, Any]
    """by the projections"""


class _Pass:
    """One forward and at most one backward over a row."""

    def __init__(self, weights: Weights, row: Row, tokens: Tensor, aux: Tensor, *, keep: bool) -> None:
        """Take tokens' embeddings [C, H] and auxiliary states [C, A, H]; `keep` what backward needs."""
        self.weights, self.row, self.tokens, self.aux, self.keep = weights, row, tokens, aux, keep
        self.heads, self.eps = weights.projections, weights.config.rms_norm_eps
        self.roots = row.root_context[row.ranks]
        self.positions = row.positions[self.roots]
        self.rotary = rotary(weights.config, row.segments.longest[1] + len(row.alive), tokens.device)
        self.steps: list[_Step] = []
        self.saved0: Any = None

    def forward(self) -> Tensor:
        """Return h_t of all steps [M, H]."""
        w, row, rows = self.weights, self.row, self.row.root_context
        entering = norm(self.tokens, w.input_norm, self.eps)
        self.context = linear(self._mixed(), w.fc)
        # Token p+1+t of root p stands at context position p+t, which is a root, too.
        entered_kv = linear(entering, self.heads.kv[0])
        entered = linear(entering.index_select(0, rows), self.heads.q[0]), entered_kv.index_select(0, rows)
        normed = norm(self.context, w.hidden_norm, self.eps)
        k0, v0, self.saved0 = self.heads.keys(entered_kv, normed, row.positions, self.rotary)
        own = len(row.alive) - 1, max(row.alive[1:], default=0)
        self.keys = Keys(k0, v0, k0.new_empty(*own, *k0.shape[1:]), v0.new_empty(*own, *v0.shape[1:]))
        hidden = self.tokens.new_empty(sum(row.alive), self.tokens.shape[1])
        stream = self.context.index_select(0, self.roots)
        for t, output in enumerate(hidden.split(row.alive)):
            stream = self._step(t, stream[: len(output)], *entered)
            output.copy_(norm(stream, w.norm, self.eps))
            if w.config.norm_output:
                stream = output
        return hidden

    def _step(self, t: int, stream: Tensor, entered_q: Tensor, entered_kv: Tensor) -> Tensor:
        """g_{t-1} [n, H] and the token halves of queries and keys [R, ...] -> g_t."""
        w, n = self.weights, len(stream)
        positions, ranks = self.positions[:n] + t, self.row.ranks[:n] + t
        normed = norm(stream, w.hidden_norm, self.eps)
        q, saved_q = self.heads.queries(entered_q.index_select(0, ranks), normed, positions, self.rotary)
        saved_kv = None
        if t > 0:
            k, v, saved_kv = self.heads.keys(entered_kv.index_select(0, ranks), normed, positions, self.rotary)
            self.keys.own_k[t - 1, :n], self.keys.own_v[t - 1, :n] = k, v
        attended, lse = attend(q, _until(self.keys, t, n), self._places(n), self.heads.scale)
        residual = normed if w.config.norm_before_residual else stream
        middle = linear(attended.flatten(1), w.output, residual)
        gate_up = linear(norm(middle, w.post_norm, self.eps), w.gate_up)
        result = linear(swiglu(gate_up), w.down, middle)
        if self.keep:
            self.steps.append(_Step(stream, middle, result, q, attended, lse, gate_up, (saved_q, saved_kv)))
        return result

    def backward(self, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the outputs [M, H] -> gradients of the tokens' embeddings [C, H] and of g_{-1} [C, H]."""
        row = self.row
        self.gradients = Keys(*(torch.zeros_like(x) for x in self.keys))
        # Gradients of what the token halves of the projections gave to every (step, root).
        d_entered: list[tuple[Tensor, Tensor]] = []
        d_stream = d_hidden.new_empty(0, d_hidden.shape[1])
        for t, d_output in reversed(list(enumerate(d_hidden.split(row.alive)))):
            d_stream, d_normed, *entered = self._step_backward(t, d_output, d_stream)
            d_entered.insert(0, (entered[0], entered[1]))
        # Root p at step t reads the token of root p+t, which is also its teacher.
        d_q, d_kv = (_sum_rows(torch.cat(x), row.pairs, row.pair_offsets) for x in zip(*d_entered, strict=True))
        return self._start_backward(d_stream, d_normed, d_q, d_kv)

    def _step_backward(self, t: int, d_output: Tensor, d_next: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Go back one step.

        Args:
            t: the step.
            d_output: [n, H] gradient of h_t from the loss.
            d_next: [n_{t+1}, H] gradient of what step t+1 read.

        Returns:
            gradients of what this step read: g_{t-1}, its norm (in step 0 alone; else it is part of the first), and
            the token halves of queries and keys.
        """
        w, step, n = self.weights, self.steps.pop(), len(d_output)
        positions, norm_output = self.positions[:n] + t, self.weights.config.norm_output
        if norm_output:
            d_output = _add_first(d_output.clone(), d_next)
        d_result = norm_backward(d_output, step.result, w.norm, self.eps)
        d_middle = self._mlp_backward(d_result if norm_output else _add_first(d_result, d_next), step)
        d_attended = linear_backward(d_middle, step.attended.flatten(1), w.output).view_as(step.attended)
        keys, gradients = _until(self.keys, t, n), _until(self.gradients, t, n)
        d_q = attend_backward(
            d_attended, step.q, step.attended, step.lse, keys, gradients, self._places(n), self.heads.scale
        )
        normed = norm(step.stream, w.hidden_norm, self.eps)
        saved_q, saved_kv = step.saved
        d_entered_q, d_normed = self.heads.queries_backward(d_q, saved_q, normed, positions, self.rotary)
        if t > 0:
            d_own = gradients.own_k[-1], gradients.own_v[-1]
            d_entered_kv, d_feature = self.heads.keys_backward(*d_own, saved_kv, normed, positions, self.rotary)
            d_normed += d_feature
        else:
            d_entered_kv = d_normed.new_zeros(n, len(self.heads.kv[0].value))
        if w.config.norm_before_residual:
            d_normed += d_middle
            d_middle = torch.zeros_like(d_middle)
        if t > 0:
            d_middle = norm_backward(d_normed, step.stream, w.hidden_norm, self.eps, d_middle)
        return d_middle, d_normed, d_entered_q, d_entered_kv

    def _mlp_backward(self, d_result: Tensor, step: _Step) -> Tensor:
        w = self.weights
        activated, d_gate_up = swiglu_backward(input_backward(d_result, w.down), step.gate_up)
        weight_backward(d_result, activated, w.down)
        d_normed = linear_backward(d_gate_up, norm(step.middle, w.post_norm, self.eps), w.gate_up)
        return norm_backward(d_normed, step.middle, w.post_norm, self.eps, d_result)

    def _start_backward(self, d_stream: Tensor, d_normed: Tensor, d_q: Tensor, d_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Go back from the gradients of the roots' g_{-1}, its norm, and the token halves [R, ...] to the inputs."""
        w, row, rows, heads = self.weights, self.row, self.row.root_context, self.heads
        normed = norm(self.context, w.hidden_norm, self.eps)
        d_entered_kv, d_context = heads.keys_backward(
            self.gradients.k0, self.gradients.v0, self.saved0, normed, row.positions, self.rotary
        )
        d_context.index_add_(0, self.roots, d_normed)
        d_context = norm_backward(d_context, self.context, w.hidden_norm, self.eps)
        d_context.index_add_(0, self.roots, d_stream)
        weight_backward(d_context, self._mixed(), w.fc)
        entering = norm(self.tokens, w.input_norm, self.eps)
        d_entered_kv.index_add_(0, rows, d_kv)
        d_entering = linear_backward(d_entered_kv, entering, heads.kv[0])
        d_entering.index_add_(0, rows, linear_backward(d_q, entering.index_select(0, rows), heads.q[0]))
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

    def _places(self, n: int) -> Places:
        return Places.of(self.row.slots[:n], self.row.segments)


def _until(keys: Keys, t: int, n: int) -> Keys:
    """The part that n roots see at step t."""
    return keys._replace(own_k=keys.own_k[:t, :n], own_v=keys.own_v[:t, :n])


def _add_first(x: Tensor, first: Tensor) -> Tensor:
    """Add to the first rows, in place."""
    x[: len(first)] += first
    return x


@kernel_on_gpu
def _sum_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum x[rows[offsets[i] : offsets[i+1]]] for every i."""
    return functional.embedding_bag(rows, x, offsets, mode="sum", include_last_offset=True)
