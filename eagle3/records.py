"""The records that stages hand to each other, one JSON line each: prompt, response, sample, reject.

Plain dictionaries at run time, so that reading one costs no more than parsing its JSON.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Message(TypedDict):
    """One message of a conversation, in OpenAI's form."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    reasoning: NotRequired[str]
    """Assistant only: its reasoning, which precedes the content."""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Assistant only: `id`, `type` and `function` (`name`, and `arguments` as JSON text) of each."""
    tool_call_id: NotRequired[str]
    """Tool only: the id of the call that it answers."""
    name: NotRequired[str]
    """Tool only: its name."""


class Prompt(TypedDict):
    """One conversation for the target to answer, turn by turn; written by `prompts`."""

    id: str
    """16 hexadecimal digits: a hash of the messages and tools."""
    source: str
    messages: list[Message]
    """An optional system message, then user messages, with answers in between if the source's own are used."""
    tools: NotRequired[list[dict[str, Any]]]
    """JSON schemas."""


class Turn(TypedDict):
    """One answer, token-exact."""

    request: dict[str, Any]
    """`messages`, `tools`, `template_kwargs`; if an engine answered, also `sampling` and `seed`."""
    prompt_ids: list[int]
    token_ids: list[int]
    """The generated ids, end of turn included."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `error`."""
    message: Message
    raw: dict[str, Any]
    """What else the engine returned, such as `usage`."""
    error: str | None
    """`code: detail` if there is no answer; the ids are then empty."""


class Response(TypedDict):
    """One conversation with its answers; written by `responses`."""

    id: str
    """The prompt's id."""
    source: str
    engine: dict[str, str]
    """`name` and versions."""
    turns: list[Turn]


class Sample(TypedDict):
    """One generation to train on; written by `samples` and `dataset`."""

    id: str
    """`{conversation}-{turn}`."""
    conversation: str
    source: str
    turn: int
    input_ids: list[int]
    """The prompt's ids, then the generated ones."""
    finish_reason: str
    spans: list[list[int]]
    """[start, end) of the generated tokens."""
    cut: NotRequired[bool]
    """Whether its end was cut off at `samples.max_length`."""
    off_policy: NotRequired[bool]
    """Whether something other than the target wrote the answer."""


class Reject(TypedDict):
    """Something that cannot be used, and why; written by `synthetic`, `prompts`, `samples` and `dataset`."""

    id: str
    source: str
    reason: str
    """The code of a `RejectedError`."""
    detail: str
    record: Any
    """What was rejected."""
