"""What a chat template renders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3.records import Message


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """What a chat template renders to ask for an answer: a conversation that ends in a user (or tool) message."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
