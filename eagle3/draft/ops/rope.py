"""Rotary position embedding, with the target's own frequencies."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Rotations by position, as tables: recomputing them for every head costs more than the rotation."""

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


@functools.lru_cache(maxsize=8)
def rope_tables(
    positions: int, dim: int, max_positions: int, parameters: tuple[tuple[str, Any], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, dim/2]. The tables of a run are few and kept.

    Scaled types (linear, llama3, yarn) come from transformers' own functions.
    """
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


def _rotate(
    x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor, direction: float, interleaved: bool
) -> Tensor:
    if x.is_cuda:
        from eagle3.draft.ops.rope_kernel import rotate as kernel

        return kernel(x, positions, cosines, sines, direction, interleaved)
    cos, sin = cosines[positions][:, None], direction * sines[positions][:, None]
    if interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.float().chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return x.copy_(joined)
