"""Conversations: one row of any known form becomes what the target is to answer.

The target's answers are generated anew, so recorded answers only say where one turn ends and the next begins.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import orjson

from eagle3.prompts.sources import RejectedError

Form = Literal["messages", "sharegpt", "prompt", "alpaca", "turns"]

_LISTS = ("messages", "conversations", "conversation")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_call": "tool",
    "observation": "tool",
}


class Conversation(NamedTuple):
    """What the target is to answer: an optional system message, then the user's turns."""

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None

    @property
    def id(self) -> str:
        """16 hexadecimal digits that stand for the content."""
        content = orjson.dumps([self.messages, self.tools], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def normalised_id(self) -> str:
        """Like `id`, blind to case, blanks and compatibility forms of letters."""
        messages = [
            [message["role"], *unicodedata.normalize("NFKC", message["content"]).casefold().split()]
            for message in self.messages
        ]
        content = orjson.dumps([messages, self.tools], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def chars(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


def detect_forms(row: Mapping[str, Any]) -> list[Form]:
    """Return every form that the row could be read as."""
    found: list[Form] = []
    for name in _LISTS:
        match row.get(name):
            case [{"role": _}, *_]:
                found.append("messages")
            case [{"from": _}, *_]:
                found.append("sharegpt")
    if isinstance(row.get("turns"), list):
        found.append("turns")
    if isinstance(row.get("instruction"), str):
        found.append("alpaca")
    if isinstance(row.get("prompt"), str | list):
        found.append("prompt")
    return found


def to_conversation(row: Mapping[str, Any], form: Form) -> Conversation:
    """Return the system message and the user's turns of a row.

    Messages of one role in a row are joined by a blank line where the row holds answers; where it holds none,
    every user message is a turn.

    Raises:
        RejectedError: the row is not of this form, or not a conversation that the target can be asked.
    """
    entries = list(_entries(row, form))
    answered = any(role == "assistant" for role, _ in entries)
    messages: list[dict[str, str]] = []
    previous = None
    for role, content in entries:
        if role == "tool":
            raise RejectedError("tool_messages", "results of tools cannot be generated anew")
        if role == previous and messages and (answered or role == "system"):
            messages[-1]["content"] += f"\n\n{content}"
        elif role == "system" and previous is not None:
            raise RejectedError("role_order", f"a system message after a {previous} message")
        elif role == "assistant" and previous in (None, "system"):
            raise RejectedError("role_order", "an answer before any user message")
        elif role != "assistant":
            messages.append({"role": role, "content": content})
        previous = role
    if not any(message["role"] == "user" for message in messages):
        raise RejectedError("no_user_message", f"roles: {', '.join(role for role, _ in entries) or 'none'}")
    _check_text(messages)
    return Conversation(messages, _tools(row.get("tools")))


def _check_text(messages: list[dict[str, str]]) -> None:
    for number, message in enumerate(messages, start=1):
        if not message["content"].strip():
            raise RejectedError("empty_message", f"message {number} ({message['role']})")
        if "\0" in message["content"]:
            raise RejectedError("nul_character", f"message {number} ({message['role']})")


def _entries(row: Mapping[str, Any], form: Form) -> Iterator[tuple[str, str]]:
    """Yield role and text of every message, answers with an empty text."""
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        yield "system", system
    match form:
        case "messages" | "sharegpt":
            role_key, text_key = ("role", "content") if form == "messages" else ("from", "value")
            for message in _list(row, form):
                yield from _entry(message, role_key, text_key)
        case "turns":
            turns = row.get("turns")
            if not isinstance(turns, list):
                raise RejectedError("wrong_form", "no list under `turns`")
            for turn in turns:
                yield "user", _text(turn)
        case "alpaca":
            yield "user", "\n\n".join(_strings(row, "instruction", "input"))
        case "prompt":
            prompt = row.get("prompt")
            if isinstance(prompt, list):
                for message in prompt:
                    yield from _entry(message, "role", "content")
            else:
                yield "user", _text(prompt)


def _list(row: Mapping[str, Any], form: Form) -> list[Any]:
    key = "role" if form == "messages" else "from"
    for name in _LISTS:
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict) and value[0].get(key) is not None:
            return value
    raise RejectedError("wrong_form", f"no list of messages with `{key}`")


def _strings(row: Mapping[str, Any], *names: str) -> Iterator[str]:
    if not isinstance(row.get(names[0]), str):
        raise RejectedError("wrong_form", f"no text under `{names[0]}`")
    yield from (row[name] for name in names if isinstance(row.get(name), str) and row[name].strip())


def _entry(message: Any, role_key: str, text_key: str) -> Iterator[tuple[str, str]]:
    if not isinstance(message, dict):
        raise RejectedError("wrong_form", f"a message is a {type(message).__name__}")
    name = message.get(role_key)
    if name not in _ROLES:
        raise RejectedError("unknown_role", repr(name))
    role = _ROLES[name]
    if role == "assistant":
        yield role, ""
        return
    text = _text(message.get(text_key))
    # Many data sets carry an empty system message in every row; it says nothing.
    if role != "system" or text.strip():
        yield role, text


def _text(content: Any) -> str:
    """Return the text of a message's content: a string, or a list of parts that are all text."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "\n".join(_part(part) for part in content)
    raise RejectedError("not_text", f"content is a {type(content).__name__}")


def _part(part: Any) -> str:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise RejectedError("not_text", f"a part of type {kind!r}")
    raise RejectedError("not_text", f"a part is a {type(part).__name__}")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool schemas; some data sets keep them as a JSON text."""
    if isinstance(value, str) and re.search(r"\S", value):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise RejectedError("bad_tools", "not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RejectedError("bad_tools", "not a list of schemas")
    return value
