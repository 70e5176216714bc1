"""`samples`: what counts as a clean sample."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings


class SamplesSettings(Settings):
    """What counts as a clean sample."""

    max_length: int = Field(default=2048, ge=8)
    """Most tokens of a sample (prompt and answer)."""
    too_long: Literal["cut", "reject"] = "cut"
    """Longer samples lose the end of their answer, or are rejected."""
    min_generated: int = Field(default=4, ge=1)
    """Fewest generated tokens worth training on."""
    truncated: Literal["keep", "reject"] = "keep"
    """Answers cut off by the token limit: their prefix is still what the target would say."""
    require_reasoning: bool = False
    """Reject answers without reasoning. Set it for a target that is served thinking."""
    max_repeats: int = Field(default=8, ge=2)
    """Reject an answer with a passage that stands in it more often than this in a row, over 32 tokens at least."""
    allowed_tokens: tuple[str, ...] = ()
    """Special tokens that belong inside answers although the template also divides turns by them (gpt-oss:
    `<|start|>`, `<|channel|>`, `<|message|>`, `<|end|>`)."""
