"""Dataset: merge the samples of all parts, shuffle them and split them by conversation."""

from __future__ import annotations

from pydantic import Field

from eagle3.settings import Settings


class DatasetSettings(Settings):
    """Order and split."""

    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the conversations, per source, that is held out."""
    seed: int = 0
