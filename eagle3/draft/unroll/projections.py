"""From tokens and features to queries, keys and values, and back: the first half of the draft's layer.

Both kinds of attention read u = concat(norm_in(token), norm_h(feature)), so the matrix over all that reads u splits
into a half for the token and a half for the feature. What it makes of u is `projected` [n, Q + K]: Q columns become
queries, the others keys and values. Step 0 needs them at different positions, so the parts exist separately, too.

`query_buffer` and `key_buffer` hold queries, keys and values, or their gradients. In grouped-query attention
they are the projected rows themselves, rotated in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.model.config import DraftConfig
from eagle3.draft.ops.linear import Weight, linear, linear_backward
from eagle3.draft.ops.norm import norm, norm_backward
from eagle3.draft.ops.own_keys import KeyValues
from eagle3.draft.ops.rope import Rotary
from eagle3.draft.unroll.rotary import softmax_scale


class InputHalf(NamedTuple):
    """The half of the matrix over u that reads the token, or the feature."""

    q: Weight
    """[Q, H]"""
    kv: Weight
    """[K, H]"""
    whole: Weight
    """[Q + K, H], both"""

    @classmethod
    def both(cls, weight: Weight, queries: int) -> tuple[InputHalf, InputHalf]:
        """Split [Q + K, 2H]."""
        first, second = (
            cls(half.rows(0, queries), half.rows(queries, len(half.value)), half) for half in weight.halves()
        )
        return first, second

    def in_float8(self, *parts: str) -> InputHalf:
        return self._replace(**{name: getattr(self, name).in_float8() for name in parts})


class GroupedProjections(NamedTuple):
    """Grouped-query attention (Llama)."""

    token: InputHalf
    feature: InputHalf
    """q_proj over k_proj over v_proj, Q = Hq*d and K = 2*Hkv*d"""
    head_dim: int
    scale: float

    @classmethod
    def prepare(cls, config: DraftConfig, attention: Any, dtype: torch.dtype) -> GroupedProjections:
        parts = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
        halves = InputHalf.both(Weight.of(dtype, *parts), len(parts[0]))
        return cls(*halves, config.head_dim, softmax_scale(config))

    def in_float8(self) -> GroupedProjections:
        return self._replace(token=self.token.in_float8("q", "kv"), feature=self.feature.in_float8("q", "kv", "whole"))

    def query_buffer(self, projected: Tensor) -> Tensor:
        """[n, Q] -> [n, Hq, d]."""
        heads: Tensor = projected.unflatten(1, (-1, self.head_dim))
        return heads

    def key_buffer(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """[n, K] -> keys and values, both [n, Hkv, d]."""
        keys, values = projected.unflatten(1, (2, -1, self.head_dim)).unbind(1)
        return keys, values

    def key_values(self, context: Tensor, own: Tensor, starts: Tensor) -> KeyValues:
        """Buffers for [C, K] and for the roots' own [n_1 + n_2 + .., K], or for their gradients."""
        return KeyValues(*self.key_buffer(context), *self.key_buffer(own), starts)

    def queries(self, projected: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
        """[n, Q] -> rotated queries [n, Hq, d]."""
        return rotary.rotate(self.query_buffer(projected), positions)

    def queries_backward(
        self, d_q: Tensor, _projected: Tensor, _d_projected: Tensor, positions: Tensor, rotary: Rotary
    ) -> None:
        """Turn the gradient of the queries [n, Hq, d] into that of `projected`, in its buffer."""
        rotary.rotate_backward(d_q, positions)

    def keys(self, _projected: Tensor, k: Tensor, _v: Tensor, positions: Tensor, rotary: Rotary) -> None:
        """Write the rotated keys and the values of [n, K] into their buffers."""
        rotary.rotate(k, positions)

    def keys_backward(
        self, d_k: Tensor, _d_v: Tensor, _projected: Tensor, _d_projected: Tensor, positions: Tensor, rotary: Rotary
    ) -> None:
        """Turn the gradients of keys and values into that of `projected`, in its buffer."""
        rotary.rotate_backward(d_k, positions)


class LatentProjections(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values written out per head."""

    token: InputHalf
    feature: InputHalf
    """q_a_proj over kv_a_proj, Q = q_lora_rank and K = kv_lora_rank+rope"""
    q_norm: Weight
    q_b: Weight
    """[Hq*(nope+rope), q_lora_rank]"""
    kv_norm: Weight
    kv_b: Weight
    """[Hq*(nope+dv), kv_lora_rank]"""
    nope: int
    heads: int
    eps: float
    scale: float

    @classmethod
    def prepare(cls, config: DraftConfig, attention: Any, dtype: torch.dtype) -> LatentProjections:
        assert config.latent is not None
        parts = attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight
        token, feature = InputHalf.both(Weight.of(dtype, *parts), len(parts[0]))
        return cls(
            token=token,
            feature=feature,
            q_norm=Weight.of(dtype, attention.q_a_layernorm.weight),
            q_b=Weight.of(dtype, attention.q_b_proj.weight),
            kv_norm=Weight.of(dtype, attention.kv_a_layernorm.weight),
            kv_b=Weight.of(dtype, attention.kv_b_proj.weight),
            nope=config.latent.qk_nope_head_dim,
            heads=config.num_attention_heads,
            eps=config.rms_norm_eps,
            scale=softmax_scale(config),
        )

    def in_float8(self) -> LatentProjections:
        return self._replace(
            token=self.token.in_float8("q", "kv"),
            feature=self.feature.in_float8("q", "kv", "whole"),
            q_b=self.q_b.in_float8(),
            kv_b=self.kv_b.in_float8(),
        )

    def query_buffer(self, projected: Tensor) -> Tensor:
        """[n, Q] -> [n, Hq, nope+rope]."""
        return projected.new_empty(len(projected), self.heads, len(self.q_b.value) // self.heads)

    def key_buffer(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """[n, K] -> keys [n, Hq, nope+rope] and values [n, Hq, dv]."""
        rank, both = len(self.kv_norm.value), len(self.kv_b.value) // self.heads
        rope = projected.shape[1] - rank
        keys = projected.new_empty(len(projected), self.heads, self.nope + rope)
        return keys, projected.new_empty(len(projected), self.heads, both - self.nope)

    def key_values(self, context: Tensor, own: Tensor, starts: Tensor) -> KeyValues:
        """Buffers for [C, K] and for the roots' own [n_1 + n_2 + .., K], or for their gradients."""
        return KeyValues(*self.key_buffer(context), *self.key_buffer(own), starts)

    def queries(self, projected: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
        """[n, Q] -> queries [n, Hq, nope+rope], their last part rotated."""
        q = linear(norm(projected, self.q_norm, self.eps), self.q_b).view(len(projected), self.heads, -1)
        rotary.rotate(q[..., self.nope :], positions)
        return q

    def queries_backward(
        self, d_q: Tensor, projected: Tensor, d_projected: Tensor, positions: Tensor, rotary: Rotary
    ) -> None:
        """Write the gradient of [n, Q] to `d_projected`; overwrites that of the queries."""
        rotary.rotate_backward(d_q[..., self.nope :], positions)
        d_normed = linear_backward(d_q.flatten(1), norm(projected, self.q_norm, self.eps), self.q_b)
        d_projected.copy_(norm_backward(d_normed, projected, self.q_norm, self.eps))

    def keys(self, projected: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotary: Rotary) -> None:
        """Write keys and values of [n, K] into their buffers. All heads share the rotated part, rotated in place."""
        latent, shared = self._split(projected)
        heads = linear(norm(latent, self.kv_norm, self.eps), self.kv_b).unflatten(1, (self.heads, -1))
        rotated = rotary.rotate(shared[:, None], positions).expand(-1, self.heads, -1)
        torch.cat([heads[..., : self.nope], rotated], -1, out=k)
        v.copy_(heads[..., self.nope :])

    def keys_backward(
        self, d_k: Tensor, d_v: Tensor, projected: Tensor, d_projected: Tensor, positions: Tensor, rotary: Rotary
    ) -> None:
        """Write the gradient of [n, K] to `d_projected`."""
        latent, (d_latent, d_shared) = self._split(projected)[0], self._split(d_projected)
        d_heads = torch.cat([d_k[..., : self.nope], d_v], -1).flatten(1)
        d_normed = linear_backward(d_heads, norm(latent, self.kv_norm, self.eps), self.kv_b)
        d_latent.copy_(norm_backward(d_normed, latent, self.kv_norm, self.eps))
        torch.sum(d_k[..., self.nope :], 1, out=d_shared)
        rotary.rotate_backward(d_shared[:, None], positions)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        rank = len(self.kv_norm.value)
        return projected[:, :rank], projected[:, rank:]


Projections = GroupedProjections | LatentProjections
