"""The draft network's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.draft.model.config import WEIGHTS, DraftConfig, read_draft_config
from eagle3.errors import Eagle3Error


class Norm(nn.Module):
    """Holds the weight of an RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, width, bias=False)
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)


class Layer(nn.Module):
    """The one decoder layer."""

    self_attn: Any
    """the projections, under the names that this kind of attention uses"""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.input_layernorm = Norm(H)
        self.hidden_norm = Norm(H)
        self.post_attention_layernorm = Norm(H)
        self.self_attn = _attention_weights(config)
        self.mlp = MLP(config)


class Draft(nn.Module):
    """The draft model's trainable weights, named as the engines load them. The embedding is the target's, frozen."""

    d2t: Tensor
    """[Vd] int64: the target id of index i in the draft vocabulary is i + d2t[i]"""
    t2d: Tensor
    """[V] bool: whether a target id is in the draft vocabulary"""

    def __init__(self, config: DraftConfig, d2t: Tensor, t2d: Tensor) -> None:
        super().__init__()
        H, A = config.hidden_size, len(config.aux_layer_ids)
        self.config = config
        self.fc = nn.Linear(A * H, H, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(H) for _ in range(A))
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(H)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def load_draft(folder: Path) -> Draft:
    """Load a draft artifact (`draft.json`, `model.safetensors`) on the CPU, in float32.

    Raises:
        Eagle3Error: tensors are missing or have other shapes than the config says; names them.
    """
    from safetensors.torch import load_file

    config = read_draft_config(folder)
    tensors = load_file(folder / WEIGHTS)
    with torch.device("meta"):
        draft = Draft(config, torch.empty(config.draft_vocab_size, dtype=torch.int64), torch.empty(config.vocab_size))
    expected = {name: list(tensor.shape) for name, tensor in draft.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        raise Eagle3Error(
            "the draft's weights do not fit its config",
            where=folder / WEIGHTS,
            found={name: found.get(name) for name in differing},
            expected={name: expected.get(name) for name in differing},
            remedy="delete the draft and run snakemake again",
        )
    draft.load_state_dict(tensors, assign=True)
    return draft


def _attention_weights(config: DraftConfig) -> nn.Module:
    H, heads = config.hidden_size, config.num_attention_heads
    module = nn.Module()
    linears: dict[str, Sequence[int]]
    if config.latent is None:
        groups, dim = config.num_key_value_heads, config.head_dim
        linears = {
            "q_proj": (2 * H, heads * dim),
            "k_proj": (2 * H, groups * dim),
            "v_proj": (2 * H, groups * dim),
            "o_proj": (heads * dim, H),
        }
    else:
        shape = config.latent
        linears = {
            "q_a_proj": (2 * H, shape.q_lora_rank),
            "kv_a_proj_with_mqa": (2 * H, shape.kv_lora_rank + shape.qk_rope_head_dim),
            "q_b_proj": (shape.q_lora_rank, heads * config.head_dim),
            "kv_b_proj": (shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim)),
            "o_proj": (heads * shape.v_head_dim, H),
        }
        module.q_a_layernorm = Norm(shape.q_lora_rank)
        module.kv_a_layernorm = Norm(shape.kv_lora_rank)
    for name, (inputs, outputs) in linears.items():
        setattr(module, name, nn.Linear(inputs, outputs, bias=False))
    return module
