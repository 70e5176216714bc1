"""EAGLE-3 as plain equations: the slow reference that the unroll is tested against.

It decodes one chain of drafts as an engine does: one token at a time, with a KV cache. To be independent of what it
checks, it shares no code with the unroll and computes rotations by the formulas of the papers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3.draft.model.network import Draft


class ReferenceChain:
    """Decodes draft tokens as an engine does: prefill, then one token at a time."""

    def __init__(self, draft: Draft, embedding: Tensor) -> None:
        self.weights = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
        self.config, self.embedding = draft.config, embedding

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.rms_norm_eps
        normed: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[name + ".weight"]
        return normed

    def frequencies(self, dim: int) -> tuple[Tensor, float]:
        """Rope frequencies by the formulas of the papers (position interpolation, Llama 3.1, YaRN)."""
        rope = self.config.rope_parameters
        plain = torch.tensor([rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)])
        if rope["rope_type"] == "default":
            return plain, 1.0
        factor = rope["factor"]
        if rope["rope_type"] == "linear":
            return plain / factor, 1.0
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        if rope["rope_type"] == "llama3":
            smooth = ((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])).clamp(
                0, 1
            )
            return (1 - smooth) * plain / factor + smooth * plain, 1.0

        def dimension(rotations: float) -> float:
            periods = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
            return dim * math.log(periods) / (2 * math.log(rope["rope_theta"]))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dim - 1)
        ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        attention = 0.1 * math.log(factor) + 1 if not self.config.latent else 1.0
        return plain / factor * ramp + plain * (1 - ramp), attention

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """One position's heads [heads, d]."""
        frequencies, attention = self.frequencies(x.shape[-1])
        turned = torch.empty_like(x)
        for i, frequency in enumerate(frequencies.tolist()):
            a, b = (2 * i, 2 * i + 1) if self.config.latent else (i, i + len(frequencies))
            cos, sin = math.cos(position * frequency) * attention, math.sin(position * frequency) * attention
            turned[:, a] = x[:, a] * cos - x[:, b] * sin
            turned[:, b] = x[:, b] * cos + x[:, a] * sin
        return turned

    def qkv(self, u: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        config, w = self.config, self.weights
        prefix = "layers.0.self_attn."
        heads = config.num_attention_heads
        if config.latent is None:
            q, k, v = ((w[f"{prefix}{name}_proj.weight"] @ u).view(-1, config.head_dim) for name in "qkv")
            repeats = heads // config.num_key_value_heads
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
            return self.rotate(q, position), self.rotate(k, position), v
        shape = config.latent
        nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
        q = w[prefix + "q_b_proj.weight"] @ self.norm(w[prefix + "q_a_proj.weight"] @ u, prefix + "q_a_layernorm")
        q = q.view(heads, -1)
        compressed = w[prefix + "kv_a_proj_with_mqa.weight"] @ u
        kv = w[prefix + "kv_b_proj.weight"] @ self.norm(compressed[:rank], prefix + "kv_a_layernorm")
        kv = kv.view(heads, -1)
        shared = self.rotate(compressed[None, rank:], position).expand(heads, -1)
        q = torch.cat([q[:, :nope], self.rotate(q[:, nope:], position)], -1)
        return q, torch.cat([kv[:, :nope], shared], -1), kv[:, nope:]

    def step(
        self, token: int, feature: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One position through the layer; appends to the cache. Returns what the next step reads, and the logits."""
        config, w = self.config, self.weights
        normed = self.norm(feature, "layers.0.hidden_norm")
        u = torch.cat([self.norm(self.embedding[token], "layers.0.input_layernorm"), normed])
        q, k, v = self.qkv(u, position)
        cache.append((k, v))
        keys, values = (torch.stack(part) for part in zip(*cache, strict=True))
        scale = config.head_dim**-0.5
        if config.latent and config.rope_parameters["rope_type"] == "yarn":
            scale *= (0.1 * math.log(config.rope_parameters["factor"]) + 1) ** 2
        weights = (torch.einsum("hd,jhd->hj", q, keys) * scale).softmax(-1)
        attended = torch.einsum("hj,jhd->hd", weights, values).flatten()
        stream = (normed if config.norm_before_residual else feature) + w["layers.0.self_attn.o_proj.weight"] @ attended
        x = self.norm(stream, "layers.0.post_attention_layernorm")
        gate, up = w["layers.0.mlp.gate_proj.weight"] @ x, w["layers.0.mlp.up_proj.weight"] @ x
        stream = stream + w["layers.0.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
        output = self.norm(stream, "norm")
        return output if config.norm_output else stream, w["lm_head.weight"] @ output

    def features(self, aux: Tensor) -> Tensor:
        """What the first step reads of auxiliary states [positions, A, H]: [positions, H]."""
        if self.config.fc_norm:
            aux = torch.stack([self.norm(aux[:, i], f"fc_norm.{i}") for i in range(aux.shape[1])], 1)
        features: Tensor = aux.flatten(1) @ self.weights["fc.weight"].T
        return features

    def chain(self, tokens: list[int], aux: Tensor, root: int, steps: int) -> list[Tensor]:
        """Logits of `steps` drafts from `root`, fed with the true tokens."""
        features = self.features(aux)
        cache: list[tuple[Tensor, Tensor]] = []
        for p in range(root + 1):
            feature, logits = self.step(tokens[p + 1], features[p], p, cache)
        chain = [logits]
        for t in range(1, steps):
            feature, logits = self.step(tokens[root + 1 + t], feature, root + t, cache)
            chain.append(logits)
        return chain
