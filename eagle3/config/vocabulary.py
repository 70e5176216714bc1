"""`vocabulary`: size of the draft vocabulary."""

from __future__ import annotations

from pydantic import Field, model_validator

from eagle3.config.base import Settings


class VocabularySettings(Settings):
    """Size of the draft vocabulary."""

    size: int | None = Field(default=None, ge=1)
    """Number of tokens in the draft vocabulary; null takes the target's whole vocabulary.

    A smaller vocabulary makes drafting cheaper, but a token outside it is never accepted. 32000 is usual for
    targets with 100,000 tokens or more; aim for a coverage above 0.98 for every source (see the report)."""
    coverage: float | None = Field(default=None, gt=0, le=1)
    """Instead of `size`: as many tokens as it takes to cover this share of the generated tokens, e.g. `0.98`."""

    @model_validator(mode="after")
    def _at_most_one(self) -> VocabularySettings:
        if self.size is not None and self.coverage is not None:
            raise ValueError("`size` and `coverage` are mutually exclusive: set only one of them")
        return self
