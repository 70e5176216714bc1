"""Settings of the hidden-state stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle3.config.base import Settings


class HiddenStatesSettings(Settings):
    """What is captured and how it is stored."""

    shards: int = Field(default=1, ge=1)
    """Files per part."""
    aux_layer_ids: Annotated[tuple[int, ...], Field(min_length=1, max_length=3)] | None = None
    """One to three layers whose *input* the draft reads; null takes the engines' default (2, n//2, n-3)."""
    encoding: Literal["lossless", "fp8"] = "lossless"
    """`fp8` stores the auxiliary states as e4m3 with one scale per token and layer: half the size."""
    min_teacher_agreement: float = Field(default=0.9, ge=0, le=1)
    """The job fails when the engine's next token equals our argmax less often than this."""
    max_failed: float = Field(default=0.01, ge=0, le=1)
    """The job fails when more than this share of the samples could not be captured, after a second attempt."""
