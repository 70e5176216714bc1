"""Rotary position embedding, with the target's own frequencies."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.model.config import DraftConfig
from eagle3.draft.ops.dispatch import kernel_on_gpu


class Rotary(NamedTuple):
    """Rotations by position, as tables: computing them anew for every head costs more than the rotation."""

    cos: Tensor
    """[positions, d/2] float32, times yarn's attention factor; likewise the sines"""
    sin: Tensor
    interleaved: bool
    """pairs are (0,1), (2,3).. as in DeepSeek; else (0,d/2), (1,d/2+1).. as in Llama"""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads [n, heads, d] by their positions [n], in place; float32 inside."""
        return _rotate(x, positions, self.cos, self.sin, 1.0, self.interleaved)

    def rotate_backward(self, d_out: Tensor, positions: Tensor) -> Tensor:
        """The gradient of `rotate`, in place: a rotation by the negative angle."""
        return _rotate(d_out, positions, self.cos, self.sin, -1.0, self.interleaved)


def rotary(config: DraftConfig, positions: int, device: torch.device) -> Rotary:
    """Return a draft's rotations by 0 .. positions-1, and some more: the tables of a run are few, and kept.

    Scaled types (linear, llama3, yarn) come from transformers' own functions.
    """
    dim = config.latent.qk_rope_head_dim if config.latent else config.head_dim
    parameters = tuple(sorted(config.rope_parameters.items()))
    rounded = 1 << (positions - 1).bit_length()
    return Rotary(
        *_tables(rounded, dim, config.max_position_embeddings, parameters, device),
        interleaved=config.latent is not None,
    )


@functools.lru_cache(maxsize=8)
def _tables(
    positions: int, dim: int, max_positions: int, parameters: tuple[tuple[str, Any], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    frequencies, scale = _frequencies(dim, max_positions, dict(parameters), device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _frequencies(dim: int, max_positions: int, values: dict[str, Any], device: torch.device) -> tuple[Tensor, float]:
    if values["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return values["rope_theta"] ** -exponents, 1.0

    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    carrier = LlamaConfig(head_dim=dim, max_position_embeddings=max_positions, rope_parameters=values)
    frequencies, scale = ROPE_INIT_FUNCTIONS[values["rope_type"]](carrier, device)
    return frequencies.float(), float(scale)


def softmax_scale(config: DraftConfig) -> float:
    """Return the factor on attention scores; DeepSeek's yarn sharpens it by mscale squared."""
    scale: float = config.head_dim**-0.5
    parameters = config.rope_parameters
    if config.latent and parameters["rope_type"] == "yarn" and parameters.get("mscale_all_dim"):
        sharpening = 0.1 * float(parameters["mscale_all_dim"]) * math.log(float(parameters["factor"])) + 1.0
        scale *= sharpening * sharpening
    return scale


@kernel_on_gpu
def _rotate(
    x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor, direction: float, interleaved: bool
) -> Tensor:
    cos, sin = cosines[positions][:, None], direction * sines[positions][:, None]
    if interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.float().chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return x.copy_(joined)
