"""`synthetic`: user turns written by the target."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class SyntheticSettings(Settings):
    """How the target writes user turns, for a prompt source with `synthetic: true`."""

    count: int = Field(default=1000, ge=1)
    """User turns to sample.

    Sample more than you need: some are unusable, and some are duplicates."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in a turn. A turn that does not end by then is rejected."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature.

    Lower it for a larger share of usable turns and less variety."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold.

    0.95 gives more sensible turns and less variety."""
    seed: int = 0
    """Seed of the sampling. Each turn's seed is derived from it and the turn's number, so a larger `count` keeps the
    earlier turns. Follows the top-level `seed` unless set."""
