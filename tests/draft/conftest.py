"""Small random drafts, samples and heads; every test states what it needs beyond these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.draft.config import DraftConfig, LatentShape
from eagle3.draft.model import Draft
from eagle3.target import HeadWeights

H, V, A = 32, 97, 3


@dataclass(frozen=True)
class RandomStates:
    """One sample's hidden states, as a reader gives them."""

    id: str
    token_ids: Tensor
    aux: Tensor
    last: Tensor
    last_rows: Tensor


def random_states(
    name: str, length: int, spans: Sequence[tuple[int, int]], generator: torch.Generator, *, aux: int = A
) -> RandomStates:
    """Random tokens and states; last-layer rows only where the contract promises them."""
    rows = [row for start, end in spans for row in range(max(start - 1, 0), end - 1)]
    return RandomStates(
        id=name,
        token_ids=torch.randint(V, (length,), generator=generator, dtype=torch.int32),
        aux=torch.randn(length, aux, H, generator=generator),
        last=torch.randn(len(rows), H, generator=generator),
        last_rows=torch.tensor(rows, dtype=torch.int64),
    )


def tiny_config(**changes: Any) -> DraftConfig:
    """A grouped-query draft with a reduced vocabulary; `latent=True` makes it an MLA draft."""
    if changes.pop("latent", False):
        latent = LatentShape(
            q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
        )
        changes = {"attention": "mla", "latent": latent, "head_dim": 12} | changes
    values: dict[str, Any] = {
        "attention": "gqa",
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "vocab_size": V,
        "draft_vocab_size": 41,
        "aux_layer_ids": tuple(range(1, A + 1)),
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
    }
    return DraftConfig(**(values | changes))


def random_draft(config: DraftConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Draft:
    """A draft whose every weight, norms included, is random."""
    chosen = torch.randperm(V, generator=generator)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool).index_fill_(0, chosen, True)
    draft = Draft(config, chosen - torch.arange(len(chosen)), t2d).to(dtype)
    for parameter in draft.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        offset = 0.0 if parameter.dim() > 1 else 1.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return draft


def random_head(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> HeadWeights:
    """Random ends of a target."""
    return HeadWeights(
        embedding=torch.randn(V, H, generator=generator, dtype=dtype),
        norm=1 + 0.3 * torch.randn(H, generator=generator, dtype=dtype),
        lm_head=torch.randn(V, H, generator=generator, dtype=dtype) / 4,
        rms_norm_eps=1e-5,
    )
