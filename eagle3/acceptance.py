"""Acceptance: what simulated and served measurements have in common."""

from __future__ import annotations

from pydantic import Field

from eagle3.settings import Settings


class AcceptanceSettings(Settings):
    """How the draft is measured."""

    drafts: int = Field(default=3, ge=1)
    """Tokens that the draft proposes per step (k); at most k+1 tokens are gained."""
    prompts: int = Field(default=48, ge=1)
    """Held-out prompts that are served, spread over the sources."""
    max_tokens: int = Field(default=96, ge=1)
    """Tokens served per prompt."""
