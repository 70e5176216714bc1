"""`synthetic`: user turns that the target writes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from eagle3.config.base import Settings

if TYPE_CHECKING:
    pass


class SyntheticSettings(Settings):
    """How the target writes user turns, for a prompt source with `synthetic: true`."""

    count: int = Field(default=1000, ge=1)
    """Turns to sample; the unusable ones among them are rejected."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of a turn; one that does not end by then is rejected."""
    temperature: float = Field(default=1.0, gt=0)
    """Lower values give more usable turns, and more alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0
