"""Answers of a source: assistant messages and tool results, in the form that chat templates expect.

Reasoning comes under `reasoning`, whatever it was called; tool calls in OpenAI's form, with arguments as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from eagle3.errors import RejectedError
from eagle3.records import Message

_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
_OPENING, _CLOSING = "<think>", "</think>"


def read_answer(message: Mapping[str, Any], text: str) -> Message:
    """Return an assistant message: content, and `reasoning` and `tool_calls` if there are any.

    Args:
        message: as the row has it.
        text: its content as text; inline reasoning, `<think>...</think>` at its start, is taken out of it.

    Raises:
        RejectedError: `reasoning_form` if reasoning is not text or is in two places, `bad_tool_call`.
    """
    found = [value for key in _REASONING_KEYS if (value := message.get(key))]
    if not all(isinstance(value, str) for value in found):
        raise RejectedError("reasoning_form", "reasoning that is not text")
    reasoning = {value.strip(): value for value in found if value.strip()}
    if text.lstrip().startswith(_OPENING):
        inline, closed, rest = text.lstrip().removeprefix(_OPENING).partition(_CLOSING)
        if not closed:
            raise RejectedError("reasoning_form", f"{_OPENING} without {_CLOSING}")
        text = rest
        if inline.strip():
            reasoning.setdefault(inline.strip(), inline)
    if len(reasoning) > 1:
        raise RejectedError("reasoning_form", "reasoning in two places that differ")
    answer: Message = {"role": "assistant", "content": text}
    if reasoning:
        [answer["reasoning"]] = reasoning.values()
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RejectedError("bad_tool_call", f"`tool_calls` is a {type(calls).__name__}")
    if calls:
        answer["tool_calls"] = [_call(call) for call in calls]
    return answer


def read_call(text: str) -> Message:
    """Return the assistant message of a ShareGPT `function_call`: a call, or a list of them, as JSON text."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise RejectedError("bad_tool_call", "not JSON") from None
    calls = value if isinstance(value, list) else [value]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}


def read_result(message: Mapping[str, Any], text: str) -> Message:
    """Return the message of a tool."""
    result: Message = {"role": "tool", "content": text}
    if isinstance(id := message.get("tool_call_id"), str):
        result["tool_call_id"] = id
    if isinstance(name := message.get("name"), str):
        result["name"] = name
    return result


def join_answers(first: Message, second: Message) -> None:
    """Append an assistant message to the one before it, as one turn.

    Raises:
        RejectedError: `role_order` if the second one has reasoning, too.
    """
    if "reasoning" in second and (first["content"] or "tool_calls" in first or "reasoning" in first):
        raise RejectedError("role_order", "two answers in a row that both reason")
    if "reasoning" in second:
        first["reasoning"] = second["reasoning"]
    first["content"] = "\n\n".join(text for text in (first["content"], second["content"]) if text)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        first["tool_calls"] = calls


def number_calls(messages: list[Message]) -> None:
    """Give each tool call without an id one (`functions.name:0`, numbered consecutively), each result its call's id."""
    count = 0
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = []
            for call in message.get("tool_calls", ()):
                call["id"] = call["id"] or f"functions.{call['function']['name']}:{count}"
                waiting.append(call["id"])
                count += 1
        elif message["role"] == "tool" and waiting:
            id = message.setdefault("tool_call_id", waiting[0])
            waiting = [other for other in waiting if other != id]


def _call(call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest}:
            arguments = rest.get("arguments", rest.get("parameters"))
        case _:
            raise RejectedError("bad_tool_call", "a call without the name of a function")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, default=str)
    try:
        valid = isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        valid = False
    if not valid:
        raise RejectedError("bad_tool_call", f"arguments of {name!r} are not a JSON object")
    id = call.get("id")
    return {
        "id": id if isinstance(id, str) else None,
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
