"""Vocabulary: choose the target tokens that the draft can propose."""

from __future__ import annotations

from pydantic import Field

from eagle3.settings import Settings


class VocabularySettings(Settings):
    """Size of the draft vocabulary."""

    size: int | None = Field(default=None, ge=1)
    """Number of draft tokens; null takes the target's whole vocabulary."""
