"""`dataset`: order and split."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class DatasetSettings(Settings):
    """Order and split."""

    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the conversations of each source held out for evaluation and acceptance; at least one of a source that
    has two or more.

    Lower it for large data: 0.01 is enough for 100,000 conversations."""
    duplicate_tokens: int = Field(default=32, ge=1)
    """Minimum length, in tokens, at which identical answers from one source count as duplicates. Only one of them is
    kept.

    Duplicates of this length are usually canned refusals, or an engine that mixed up its answers."""
    seed: int = 0
    """Seed of the shuffle and the split. Follows the top-level `seed` unless set."""
