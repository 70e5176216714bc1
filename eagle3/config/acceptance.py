"""`acceptance`: how the draft model is measured."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class AcceptanceSettings(Settings):
    """How the draft model is measured."""

    drafts: int = Field(default=3, ge=1)
    """Draft tokens proposed per step (k). The acceptance length is at most k + 1.

    Use the value you serve with. Try 2 to 5: the more draft tokens, the more are wasted when few are accepted."""
    prompts: int = Field(default=48, ge=1)
    """Held-out prompts to serve, spread over the sources.

    Raise it for steadier figures: a few hundred to compare drafts."""
    max_tokens: int = Field(default=96, ge=1)
    """Maximum number of tokens generated per prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Above 0, the prompts are also served with sampling, with and without the draft. Follows `responses.temperature`
    unless set.

    Keep it equal to `responses.temperature`: the simulated figure replays those responses."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold. Follows `responses.top_p` unless set."""
