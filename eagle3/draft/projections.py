"""From tokens and features to queries, keys and values: the first half of the draft's layer.

Both kinds of attention read u = concat(norm_in(token), norm_h(feature)), so every matrix that reads u splits into a
half for the token and a half for the feature; `enter_*` applies the first, `queries` and `keys` add the second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagle3.draft.accelerate import compiled_on_gpu
from eagle3.draft.config import DraftConfig
from eagle3.draft.rope import Rotary, rotary, rotate, softmax_scale


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, statistics in float32."""
    return functional.rms_norm(x, weight.shape, weight, eps)


class GroupedProjections(NamedTuple):
    """Grouped-query attention (Llama)."""

    q: tuple[Tensor, Tensor]
    """q_proj's halves for token and feature, each [Hq*d, H]"""
    kv: tuple[Tensor, Tensor]
    """the same of k_proj over v_proj [2*Hkv*d, H]"""
    head_dim: int
    rotary: Rotary
    scale: float

    @classmethod
    def prepare(cls, config: DraftConfig, attention: Any, dtype: torch.dtype) -> GroupedProjections:
        q = attention.q_proj.weight.to(dtype)
        kv = torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype)
        return cls(_halves(q), _halves(kv), config.head_dim, rotary(config, q.device), softmax_scale(config))

    def enter_q(self, token: Tensor) -> Tensor:
        """[n, H] -> [n, Hq*d]."""
        return functional.linear(token, self.q[0])

    def enter_kv(self, token: Tensor) -> Tensor:
        """[n, H] -> [n, 2*Hkv*d]."""
        return functional.linear(token, self.kv[0])

    def queries(self, entered: Tensor, feature: Tensor, positions: Tensor) -> Tensor:
        """Return rotated queries [n, Hq, d]."""
        return _rotated(entered, feature, self.q[1], positions, self.head_dim, *self.rotary)

    def keys(self, entered: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, both [n, Hkv, d]."""
        return _keys_and_values(entered, feature, self.kv[1], positions, self.head_dim, *self.rotary)


@compiled_on_gpu
def _rotated(
    entered: Tensor,
    feature: Tensor,
    weight: Tensor,
    positions: Tensor,
    head_dim: int,
    frequencies: Tensor,
    scale: float,
    interleaved: bool,
) -> Tensor:
    heads = torch.addmm(entered, feature, weight.mT).unflatten(1, (-1, head_dim))
    return rotate(heads, positions, frequencies, scale, interleaved)


@compiled_on_gpu
def _keys_and_values(
    entered: Tensor,
    feature: Tensor,
    weight: Tensor,
    positions: Tensor,
    head_dim: int,
    frequencies: Tensor,
    scale: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    keys, values = torch.addmm(entered, feature, weight.mT).unflatten(1, (2, -1, head_dim)).unbind(1)
    return rotate(keys, positions, frequencies, scale, interleaved), values.contiguous()


class LatentProjections(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values written out per head."""

    q_a: tuple[Tensor, Tensor]
    """halves for token and feature, each [q_lora_rank, H]"""
    q_norm: Tensor
    q_b: Tensor
    """[Hq*(nope+rope), q_lora_rank]"""
    kv_a: tuple[Tensor, Tensor]
    """each [kv_lora_rank+rope, H]"""
    kv_norm: Tensor
    kv_b: Tensor
    """[Hq*(nope+dv), kv_lora_rank]"""
    nope: int
    eps: float
    heads: int
    rotary: Rotary
    scale: float

    @classmethod
    def prepare(cls, config: DraftConfig, attention: Any, dtype: torch.dtype) -> LatentProjections:
        assert config.latent is not None
        return cls(
            q_a=_halves(attention.q_a_proj.weight.to(dtype)),
            q_norm=attention.q_a_layernorm.weight.to(dtype),
            q_b=attention.q_b_proj.weight.to(dtype),
            kv_a=_halves(attention.kv_a_proj_with_mqa.weight.to(dtype)),
            kv_norm=attention.kv_a_layernorm.weight.to(dtype),
            kv_b=attention.kv_b_proj.weight.to(dtype),
            nope=config.latent.qk_nope_head_dim,
            eps=config.rms_norm_eps,
            heads=config.num_attention_heads,
            rotary=rotary(config, attention.q_b_proj.weight.device),
            scale=softmax_scale(config),
        )

    def enter_q(self, token: Tensor) -> Tensor:
        """[n, H] -> [n, q_lora_rank]."""
        return functional.linear(token, self.q_a[0])

    def enter_kv(self, token: Tensor) -> Tensor:
        """[n, H] -> [n, kv_lora_rank+rope]."""
        return functional.linear(token, self.kv_a[0])

    def queries(self, entered: Tensor, feature: Tensor, positions: Tensor) -> Tensor:
        """Return queries [n, Hq, nope+rope], their last part rotated."""
        return _latent_queries(
            entered,
            feature,
            self.q_a[1],
            self.q_norm,
            self.q_b,
            positions,
            self.heads,
            self.nope,
            self.eps,
            *self.rotary,
        )

    def keys(self, entered: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [n, Hq, nope+rope] and values [n, Hq, dv]; all heads share the rotated part."""
        return _latent_keys(
            entered,
            feature,
            self.kv_a[1],
            self.kv_norm,
            self.kv_b,
            positions,
            self.heads,
            self.nope,
            self.eps,
            *self.rotary,
        )


@compiled_on_gpu
def _latent_queries(
    entered: Tensor,
    feature: Tensor,
    q_a: Tensor,
    q_norm: Tensor,
    q_b: Tensor,
    positions: Tensor,
    heads: int,
    nope: int,
    eps: float,
    frequencies: Tensor,
    scale: float,
    interleaved: bool,
) -> Tensor:
    latent = norm(torch.addmm(entered, feature, q_a.mT), q_norm, eps)
    q = functional.linear(latent, q_b).unflatten(1, (heads, -1))
    rotated = rotate(q[..., nope:], positions, frequencies, scale, interleaved)
    return torch.cat([q[..., :nope], rotated], -1)


@compiled_on_gpu
def _latent_keys(
    entered: Tensor,
    feature: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    heads: int,
    nope: int,
    eps: float,
    frequencies: Tensor,
    scale: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    compressed = torch.addmm(entered, feature, kv_a.mT)
    latent, shared = compressed.split([kv_norm.shape[0], 2 * frequencies.shape[0]], dim=-1)
    expanded = functional.linear(norm(latent, kv_norm, eps), kv_b).unflatten(1, (heads, -1))
    rotated = rotate(shared[:, None], positions, frequencies, scale, interleaved)
    keys = torch.cat([expanded[..., :nope], rotated.expand(-1, heads, -1)], -1)
    return keys, expanded[..., nope:].contiguous()


Projections = GroupedProjections | LatentProjections


def _halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split [out, 2H] into its halves for token and feature."""
    token, feature = weight.chunk(2, dim=1)
    return token, feature
