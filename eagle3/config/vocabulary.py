"""`vocabulary`: size of the draft vocabulary."""

from __future__ import annotations

from pydantic import Field, model_validator

from eagle3.config.base import Settings


class VocabularySettings(Settings):
    """Size of the draft vocabulary."""

    size: int | None = Field(default=None, ge=1)
    """Number of draft tokens; null takes the target's whole vocabulary."""
    coverage: float | None = Field(default=None, gt=0, le=1)
    """In place of a size: as many tokens as it takes to cover this share of the generated tokens."""

    @model_validator(mode="after")
    def _one_of_both(self) -> VocabularySettings:
        if self.size is not None and self.coverage is not None:
            raise ValueError("`size` and `coverage` exclude each other: set one")
        return self
