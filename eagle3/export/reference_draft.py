"""The exported draft model in plain PyTorch: the reference for what engines compute from `plain/`.

It reads nothing but the exported folder and is built from transformers' own Llama and DeepSeek layers, so it shares
no code with the training forward: where both agree, the export has everything an engine needs.

B rows · n tokens · A tapped layers · H hidden size · V and Vd target and draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from eagle3.errors import Eagle3Error
from eagle3.export.position_cache import PositionCache
from eagle3.files.records import read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        H = config.hidden_size
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(H, config.rms_norm_eps) for _ in range(3)
        )
        latent = isinstance(config, DeepseekV3Config)
        self.self_attn = DeepseekV3Attention(config, 0) if latent else LlamaAttention(config, 0)
        # The layer's input is the embedding and the feature, concatenated.
        for name in ("q_a_proj", "kv_a_proj_with_mqa") if latent else ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * H, width, bias=False))
        self.mlp = DeepseekV3MLP(config) if latent else LlamaMLP(config)


def _layer_config(values: dict[str, Any]) -> Any:
    """Return the transformers config of the draft's layer; an MLA draft is recognised by its latent size."""
    kind = DeepseekV3Config if "kv_lora_rank" in values else LlamaConfig
    config = kind(**{key: value for key, value in values.items() if key != "model_type"})
    config._attn_implementation = "sdpa"
    return config


class ReferenceDraft(nn.Module):
    """One-layer EAGLE-3 draft. `embedding` [V, H] is the target's; the export does not contain it."""

    embedding: Tensor
    d2t: Tensor

    def __init__(self, values: dict[str, Any], embedding: Tensor) -> None:
        super().__init__()
        self.values = values
        config = _layer_config(values)
        H, Vd = config.hidden_size, values["draft_vocab_size"]
        chunks, chunk = values["num_aux_hidden_states"], values.get("target_hidden_size", H)
        self.fc = nn.Linear(chunks * chunk, H, bias=False)
        if values.get("fc_norm"):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(chunk, config.rms_norm_eps) for _ in range(chunks))
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, Vd, bias=False)
        # Where both vocabularies are the same, engines read no map, and vLLM refuses one.
        self.reduced = Vd != values["vocab_size"]
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(Vd, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(values["vocab_size"], dtype=torch.bool))
        self.register_buffer("embedding", embedding, persistent=False)
        with torch.device(embedding.device):
            rotary = DeepseekV3RotaryEmbedding if isinstance(config, DeepseekV3Config) else LlamaRotaryEmbedding
            self.rotary = rotary(config)

    @property
    def layer_ids(self) -> list[int]:
        """The target's layers whose input the draft reads, ascending."""
        return list(self.values["eagle_aux_hidden_state_layer_ids"])

    def combine(self, aux: Tensor) -> Tensor:
        """Return features [B, n, H] of the target's states [B, n, A*H]."""
        if self.values.get("fc_norm"):
            chunks = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        features: Tensor = self.fc(aux)
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, cache: PositionCache
    ) -> tuple[Tensor, Tensor]:
        """Run n positions.

        Args:
            tokens: [B, n], the token *after* each position.
            features: [B, n, H], from `combine` or from the step before.
            positions: [B, n].
            cache: keys and values of what came before.

        Returns:
            what lm_head reads, and the features for the next step, both [B, n, H].
        """
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(features)
        entering = layer.input_layernorm(self.embedding[tokens].to(features.dtype))
        attended, _ = layer.self_attn(
            torch.cat([entering, normed], -1),
            position_embeddings=self.rotary(features, positions),
            attention_mask=cache.place(positions),
            past_key_values=cache,
        )
        stream = (normed if self.values.get("norm_before_residual") else features) + attended
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        hidden = self.norm(stream)
        return hidden, hidden if self.values.get("norm_output") else stream

    def tokens(self, hidden: Tensor) -> Tensor:
        """Return the most likely target ids [...] for hidden states [..., H]."""
        best: Tensor = self.lm_head(hidden).argmax(-1)
        return best + self.d2t[best] if self.reduced else best

    def chain(self) -> Chain:
        """Start drafting for a batch."""
        return Chain(self)


class Chain:
    """Greedy chains of draft tokens for a batch, in step with the target."""

    def __init__(self, draft: ReferenceDraft) -> None:
        self._draft = draft
        self._cache = PositionCache()
        self._hidden = self._feature = self._root = torch.zeros(0)

    def commit(self, tokens: Tensor, aux: Tensor, start: Tensor, last: Tensor) -> None:
        """Run positions whose states the target has computed; the last one is the root of the next proposals.

        Args:
            tokens: [B, n], the token after each position.
            aux: [B, n, A*H], the target's states at these positions.
            start: [B], the first position.
            last: [B], index 0..n-1 of each row's last valid position; later ones are overwritten by the next call.
        """
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden, features = self._draft(tokens, self._draft.combine(aux), positions, self._cache)
        rows = torch.arange(len(last), device=last.device)
        self._hidden, self._feature = hidden[rows, last][:, None], features[rows, last][:, None]
        self._root = (start + last)[:, None]

    def propose(self, k: int) -> Tensor:
        """Return k draft tokens [B, k] after the token that the root has read."""
        tokens = [self._draft.tokens(self._hidden)]
        feature = self._feature
        for step in range(1, k):
            hidden, feature = self._draft(tokens[-1], feature, self._root + step, self._cache)
            tokens.append(self._draft.tokens(hidden))
        return torch.cat(tokens, 1)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._hidden, self._feature, self._root = self._hidden[rows], self._feature[rows], self._root[rows]
        self._cache.select(rows)


def load_reference_draft(folder: Path, embedding: Tensor) -> ReferenceDraft:
    """Load an exported draft (`config.json`, `model.safetensors`) in float32 on the embedding's device.

    Raises:
        Eagle3Error: tensors are missing, unexpected or of another shape than the config says; names them all.
    """
    with torch.device("meta"):
        draft = ReferenceDraft(read_json(folder / CONFIG), embedding)
    found = load_file(folder / WEIGHTS, device=str(embedding.device))
    expected = {name: list(tensor.shape) for name, tensor in draft.state_dict().items()}
    actual = {name: list(tensor.shape) for name, tensor in found.items()}
    unmatched = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if unmatched:
        raise Eagle3Error(
            f"the exported draft does not load: {len(unmatched)} tensors do not match its config",
            where=folder,
            found=", ".join(f"{name} {actual.get(name, 'missing')}" for name in unmatched),
            expected=", ".join(f"{name} {expected.get(name, 'no such tensor')}" for name in unmatched),
            remedy="export the draft again",
        )
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    draft.load_state_dict(tensors, assign=True)
    return draft
