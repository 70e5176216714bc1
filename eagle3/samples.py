"""Samples: raw responses become clean token samples with spans; what is not clean is rejected with a reason."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.settings import Settings


class SamplesSettings(Settings):
    """What counts as a clean sample."""

    max_length: int = Field(default=2048, ge=8)
    """Most tokens of a sample (prompt and answer)."""
    min_generated: int = Field(default=4, ge=1)
    """Fewest generated tokens worth training on."""
    truncated: Literal["keep", "reject"] = "keep"
    """Answers cut off by the token limit: their prefix is still what the target would say."""
    max_repeats: int = Field(default=8, ge=2)
    """Reject an answer that ends in the same passage repeated more often than this."""
