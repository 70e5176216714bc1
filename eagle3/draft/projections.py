"""From tokens and features to queries, keys and values, and back: the first half of the draft's layer.

Both kinds of attention read u = concat(norm_in(token), norm_h(feature)), so every matrix that reads u splits into a
half for the token and a half for the feature. What the first half makes of the tokens (`entered`) is an input here,
and is overwritten.

`queries` and `keys` also return what their backward needs besides their inputs; those take gradients of the outputs
and return gradients of `entered` and of the feature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.draft.rope import Rotary, softmax_scale
from eagle3.draft.weights import Weight, add_linear, linear, linear_backward, norm, norm_backward

Gradients = tuple[Tensor, Tensor]


class GroupedProjections(NamedTuple):
    """Grouped-query attention (Llama)."""

    q: tuple[Weight, Weight]
    """q_proj's halves for token and feature, each [Hq*d, H]"""
    kv: tuple[Weight, Weight]
    """the same of k_proj over v_proj [2*Hkv*d, H]"""
    head_dim: int
    scale: float

    @classmethod
    def prepare(cls, config: DraftConfig, attention: Any, dtype: torch.dtype) -> GroupedProjections:
        q = Weight.of(dtype, attention.q_proj.weight)
        kv = Weight.of(dtype, attention.k_proj.weight, attention.v_proj.weight)
        return cls(q.halves(), kv.halves(), config.head_dim, softmax_scale(config))

    def in_float8(self) -> GroupedProjections:
        return self._replace(q=_both_in_float8(self.q), kv=_both_in_float8(self.kv))

    def queries(self, entered: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, None]:
        """[n, Hq*d], [n, H] -> rotated queries [n, Hq, d]."""
        heads = add_linear(entered, feature, self.q[1]).unflatten(1, (-1, self.head_dim))
        return rotary.rotate(heads, positions), None

    def queries_backward(
        self, d_q: Tensor, _saved: None, feature: Tensor, positions: Tensor, rotary: Rotary
    ) -> Gradients:
        d_entered = rotary.rotate_backward(d_q, positions).flatten(1)
        return d_entered, linear_backward(d_entered, feature, self.q[1])

    def keys(self, entered: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, None]:
        """[n, 2*Hkv*d], [n, H] -> rotated keys and values, both [n, Hkv, d]."""
        both = add_linear(entered, feature, self.kv[1]).unflatten(1, (2, -1, self.head_dim))
        keys, values = both.unbind(1)
        return rotary.rotate(keys, positions), values.contiguous(), None

    def keys_backward(
        self, d_k: Tensor, d_v: Tensor, _saved: None, feature: Tensor, positions: Tensor, rotary: Rotary
    ) -> Gradients:
        d_entered = torch.stack([rotary.rotate_backward(d_k, positions), d_v], 1).flatten(1)
        return d_entered, linear_backward(d_entered, feature, self.kv[1])


class LatentProjections(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values written out per head."""

    q: tuple[Weight, Weight]
    """q_a_proj's halves for token and feature, each [q_lora_rank, H]"""
    q_norm: Weight
    q_b: Weight
    """[Hq*(nope+rope), q_lora_rank]"""
    kv: tuple[Weight, Weight]
    """kv_a_proj's, each [kv_lora_rank+rope, H]"""
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
        return cls(
            q=Weight.of(dtype, attention.q_a_proj.weight).halves(),
            q_norm=Weight.of(dtype, attention.q_a_layernorm.weight),
            q_b=Weight.of(dtype, attention.q_b_proj.weight),
            kv=Weight.of(dtype, attention.kv_a_proj_with_mqa.weight).halves(),
            kv_norm=Weight.of(dtype, attention.kv_a_layernorm.weight),
            kv_b=Weight.of(dtype, attention.kv_b_proj.weight),
            nope=config.latent.qk_nope_head_dim,
            heads=config.num_attention_heads,
            eps=config.rms_norm_eps,
            scale=softmax_scale(config),
        )

    def in_float8(self) -> LatentProjections:
        return self._replace(
            q=_both_in_float8(self.q),
            q_b=self.q_b.in_float8(),
            kv=_both_in_float8(self.kv),
            kv_b=self.kv_b.in_float8(),
        )

    def queries(self, entered: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[n, q_lora_rank], [n, H] -> queries [n, Hq, nope+rope], their last part rotated."""
        latent = add_linear(entered, feature, self.q[1])
        q = linear(norm(latent, self.q_norm, self.eps), self.q_b).unflatten(1, (self.heads, -1))
        return torch.cat([q[..., : self.nope], rotary.rotate(q[..., self.nope :], positions)], -1), latent

    def queries_backward(
        self, d_q: Tensor, latent: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary
    ) -> Gradients:
        d_rotated = rotary.rotate_backward(d_q[..., self.nope :], positions)
        d_heads = torch.cat([d_q[..., : self.nope], d_rotated], -1).flatten(1)
        d_normed = linear_backward(d_heads, norm(latent, self.q_norm, self.eps), self.q_b)
        d_entered = norm_backward(d_normed, latent, self.q_norm, self.eps)
        return d_entered, linear_backward(d_entered, feature, self.q[1])

    def keys(
        self, entered: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[n, kv_lora_rank+rope], [n, H] -> keys [n, Hq, nope+rope] and values [n, Hq, dv].

        All heads share the rotated part.
        """
        compressed = add_linear(entered, feature, self.kv[1])
        latent, shared = self._split(compressed)
        heads = linear(norm(latent, self.kv_norm, self.eps), self.kv_b).unflatten(1, (self.heads, -1))
        rotated = rotary.rotate(shared[:, None], positions).expand(-1, self.heads, -1)
        return torch.cat([heads[..., : self.nope], rotated], -1), heads[..., self.nope :].contiguous(), compressed

    def keys_backward(
        self, d_k: Tensor, d_v: Tensor, compressed: Tensor, feature: Tensor, positions: Tensor, rotary: Rotary
    ) -> Gradients:
        latent, _ = self._split(compressed)
        d_heads = torch.cat([d_k[..., : self.nope], d_v], -1).flatten(1)
        d_shared = rotary.rotate_backward(d_k[..., self.nope :].sum(1, keepdim=True), positions)[:, 0]
        d_normed = linear_backward(d_heads, norm(latent, self.kv_norm, self.eps), self.kv_b)
        d_latent = norm_backward(d_normed, latent, self.kv_norm, self.eps)
        d_entered = torch.cat([d_latent, d_shared], -1)
        return d_entered, linear_backward(d_entered, feature, self.kv[1])

    def _split(self, compressed: Tensor) -> tuple[Tensor, Tensor]:
        rank = len(self.kv_norm.value)
        return compressed[:, :rank], compressed[:, rank:]


def _both_in_float8(halves: tuple[Weight, Weight]) -> tuple[Weight, Weight]:
    return halves[0].in_float8(), halves[1].in_float8()


Projections = GroupedProjections | LatentProjections
