"""`responses`: how the target answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from eagle3.config.base import Settings


class ResponsesSettings(Settings):
    """How the target answers."""

    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens per answer, reasoning included.

    The default suits the demo. Give a reasoning model as many as it uses (32768): the draft never learns what is cut
    off."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy.

    Use the value you serve with, such as 1.0 for a thinking model."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold.

    Use the value you serve with."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template. A key that the template does not use has no effect.

    To turn thinking on: `thinking: true` (Kimi), `enable_thinking: true` (Qwen)."""
    shards: int = Field(default=1, ge=1)
    """Files per part.

    Raise it above about 10,000 conversations per part."""
    max_error_share: float = Field(default=0.05, ge=0, le=1)
    """Maximum share of a part's conversations that may end in an error. Above it (and above one conversation), the
    stage fails; up to it, they are recorded and rejected later. Prompts whose text contains special tokens do not
    count."""
    seed: int = 0
    """Seed of the sampling. Each request's seed is derived from it. Follows the top-level `seed` unless set."""
