"""What a draft's configuration says about rotation and attention scores."""

from __future__ import annotations

import math

import torch

from eagle3.draft.model.config import DraftConfig
from eagle3.draft.ops.rope import Rotary, rope_tables


def rotary(config: DraftConfig, positions: int, device: torch.device) -> Rotary:
    """Return a draft's rotations by 0 .. positions-1; rounded up to a power of two, so that few tables are made."""
    dim = config.latent.qk_rope_head_dim if config.latent else config.head_dim
    parameters = tuple(sorted(config.rope_parameters.items()))
    rounded = 1 << (positions - 1).bit_length()
    return Rotary(
        *rope_tables(rounded, dim, config.max_position_embeddings, parameters, device),
        interleaved=config.latent is not None,
    )


def softmax_scale(config: DraftConfig) -> float:
    """Return the factor on attention scores; DeepSeek's yarn sharpens it by mscale squared."""
    scale: float = config.head_dim**-0.5
    parameters = config.rope_parameters
    if config.latent and parameters["rope_type"] == "yarn" and parameters.get("mscale_all_dim"):
        sharpening = 0.1 * float(parameters["mscale_all_dim"]) * math.log(float(parameters["factor"])) + 1.0
        scale *= sharpening * sharpening
    return scale
