"""Responses: let the target answer every prompt, turn by turn, and keep the raw, token-exact records."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from eagle3.settings import Settings


class ResponsesSettings(Settings):
    """How the target answers."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens per answer, reasoning included."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy. Use what you will serve with: 1.0 for Kimi-K2.5 thinking."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, e.g. `thinking: true` (Kimi) or `enable_thinking: true` (Qwen)."""
    shards: int = Field(default=1, ge=1)
    """Files per part."""
    seed: int = 0
