"""`samples`: what counts as a clean sample."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings


class SamplesSettings(Settings):
    """What counts as a clean sample."""

    max_length: int = Field(default=2048, ge=8)
    """Maximum number of tokens in a sample, prompt and answer.

    Raise it with `responses.max_tokens`. Capture and training need more memory for longer samples."""
    too_long: Literal["cut", "reject"] = "cut"
    """`cut` shortens the answer of a longer sample and marks it; `reject` drops the sample. A prompt that leaves
    no room for an answer is always rejected."""
    min_generated: int = Field(default=4, ge=1)
    """Minimum number of generated tokens."""
    truncated: Literal["keep", "reject"] = "keep"
    """`keep` or `reject` answers cut off by the token limit. Their beginning is still what the target would say.

    Set `reject` if many end in the middle of their reasoning."""
    require_reasoning: bool = False
    """Reject answers without reasoning.

    Set it for a target that is served with thinking on."""
    max_repeats: int = Field(default=8, ge=2)
    """Maximum number of times a passage may repeat back to back, over at least 32 tokens. An answer with more
    repeats is rejected: the target was stuck in a loop.

    Raise it if tables with rows of equal values are rejected."""
    allowed_tokens: tuple[str, ...] = ()
    """Special tokens that may occur inside an answer although the chat template also uses them between turns. Answers
    with any other are rejected.

    For gpt-oss: `<|start|>`, `<|channel|>`, `<|message|>`, `<|end|>`."""
