"""`dataset`: order and split."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class DatasetSettings(Settings):
    """Order and split."""

    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the conversations, per source, that is held out; at least one of a source that has two or more."""
    duplicate_tokens: int = Field(default=32, ge=1)
    """Of answers of one source that are the same, token by token, and at least so long, one stays."""
    seed: int = 0
