"""`responses`: how the target answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from eagle3.config.base import Settings

if TYPE_CHECKING:
    pass


class ResponsesSettings(Settings):
    """How the target answers."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens per answer, reasoning included."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy. Use what you will serve with: 1.0 for Kimi-K2.5 thinking."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. `thinking: true` (Kimi) or `enable_thinking: true` (Qwen)."""
    shards: int = Field(default=1, ge=1)
    """Files per part."""
    max_error_share: float = Field(default=0.05, ge=0, le=1)
    """The stage fails when more than this share of a part's conversations (and more than one) ends in an error,
    those aside whose text holds special tokens."""
    seed: int = 0
