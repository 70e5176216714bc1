"""`acceptance`: how the draft is measured."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class AcceptanceSettings(Settings):
    """How the draft is measured."""

    drafts: int = Field(default=3, ge=1)
    """Tokens that the draft proposes per step (k); at most k+1 tokens are gained."""
    prompts: int = Field(default=48, ge=1)
    """Held-out prompts that are served, spread over the sources."""
    max_tokens: int = Field(default=96, ge=1)
    """Tokens served per prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Above 0, prompts are also served sampled, with and without the draft. Follows `responses.temperature` unless set:
    the simulated figure replays those responses, and so compares with serving at their temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """The same for `responses.top_p`."""
