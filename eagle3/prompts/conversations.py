"""Conversations: one row of any known form becomes what the target is to answer, or what was answered.

Where the target answers itself, recorded answers only say where one turn ends and the next begins, and a conversation
ends before the first tool result: the target's own calls will differ. Where the answers are used as is, they are
kept, with their reasoning, their tool calls and what those returned.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from eagle3.config.prompts import Form
from eagle3.errors import RejectedError
from eagle3.prompts.answers import join_answers, number_calls, read_answer, read_call, read_result
from eagle3.records import Message

_LISTS = ("messages", "conversations", "conversation")
_SYSTEM = ("system", "system_prompt")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    # Names in ShareGPT's own files.
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_call": "assistant",
    "observation": "tool",
}


class Conversation(NamedTuple):
    """An optional system message, then the user's turns; with the answers between them where those are used as is."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    cut: bool = False
    """Whether it was cut before the first tool result."""

    @property
    def id(self) -> str:
        """16 hexadecimal digits: a hash of the messages and tools."""
        content = orjson.dumps([self.messages, self.tools], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def normalised_id(self) -> str:
        """Like `id`, but ignoring case, whitespace and compatibility forms of letters."""
        messages = [
            [{**message, "content": ""}, *unicodedata.normalize("NFKC", message["content"]).casefold().split()]
            for message in self.messages
        ]
        content = orjson.dumps([messages, self.tools], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def chars(self) -> int:
        return sum(len(text) for message in self.messages for text in _texts(message))


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


def to_conversation(row: Mapping[str, Any], form: Form, *, as_is: bool = False) -> Conversation:
    """Return the system message and the user's turns of a row, and with `as_is` also the answers.

    Messages of one role in a row are joined by a blank line if the row has answers; if it has none, every
    user message is a turn.

    Raises:
        RejectedError: the row is not of this form, or not a conversation that the target can answer.
    """
    entries = list(_entries(row, form, as_is=as_is))
    roles = [message["role"] for message in entries]
    cut = not as_is and "tool" in roles
    messages: list[Message] = []
    previous = None
    for message in entries:
        role, last = message["role"], messages[-1] if messages else message
        if role == "tool" and previous not in ("assistant", "tool"):
            raise RejectedError("tool_messages", "the result of a tool that no answer has called")
        if role == "tool" and cut:
            break
        if role == "system" and previous not in (None, "system"):
            raise RejectedError("role_order", f"a system message after one of role {previous}")
        if role == "assistant" and previous in (None, "system"):
            raise RejectedError("role_order", "an answer before any user message")
        if role != previous or not ("assistant" in roles or role == "system") or role == "tool":
            messages.append(message)
        elif role == "assistant":
            join_answers(last, message)
        elif role != "system" or message["content"] != last["content"]:
            # Some rows hold their system message twice: in a column, and as the first message.
            last["content"] += f"\n\n{message['content']}"
        previous = role
    if "user" not in roles:
        raise RejectedError("no_user_message", f"roles: {', '.join(roles) or 'none'}")
    messages = _answered(messages) if as_is else [m for m in messages if m["role"] != "assistant"]
    _check_text(messages)
    return Conversation(messages, _tools(row.get("tools")), cut)


def _answered(messages: list[Message]) -> list[Message]:
    """Leave out what follows the last answer."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise RejectedError("no_answer", "no message of an assistant, though the given answers are to be used")
    number_calls(messages)
    return messages


def _check_text(messages: list[Message]) -> None:
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("system", "user") and not message["content"].strip():
            raise RejectedError("empty_message", f"message {number} ({message['role']})")
        if any("\0" in text for text in _texts(message)):
            raise RejectedError("nul_character", f"message {number} ({message['role']})")


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    yield message.get("reasoning", "")
    yield from (call["function"]["arguments"] for call in message.get("tool_calls", ()))


def _entries(row: Mapping[str, Any], form: Form, *, as_is: bool) -> Iterator[Message]:
    """Yield every message; answers are empty unless they are to be used."""
    for name in _SYSTEM:
        system = row.get(name)
        if isinstance(system, str) and system.strip():
            yield {"role": "system", "content": system}
    match form:
        case "messages" | "sharegpt":
            role_key, text_key = ("role", "content") if form == "messages" else ("from", "value")
            for message in _list(row, form):
                yield from _entry(message, role_key, text_key, as_is=as_is)
        case "turns":
            turns = row.get("turns")
            if not isinstance(turns, list):
                raise RejectedError("wrong_form", "no list under `turns`")
            for turn in turns:
                yield {"role": "user", "content": _text(turn)}
        case "alpaca":
            yield {"role": "user", "content": "\n\n".join(_strings(row, "instruction", "input"))}
            yield from _completion(row.get("output"), as_is=as_is)
        case "prompt":
            prompt = row.get("prompt")
            if isinstance(prompt, list):
                for message in prompt:
                    yield from _entry(message, "role", "content", as_is=as_is)
            else:
                yield {"role": "user", "content": _text(prompt)}
            yield from _completion(row.get("completion"), as_is=as_is)


def _completion(value: Any, *, as_is: bool) -> Iterator[Message]:
    """Yield the answer next to a prompt (a text, or messages), if it is to be used."""
    if as_is and value:
        messages = value if isinstance(value, list) else [{"role": "assistant", "content": value}]
        for message in messages:
            yield from _entry(message, "role", "content", as_is=True)


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


def _entry(message: Any, role_key: str, text_key: str, *, as_is: bool) -> Iterator[Message]:
    if not isinstance(message, dict):
        raise RejectedError("wrong_form", f"a message is a {type(message).__name__}")
    name = str(message.get(role_key)).lower()
    if name not in _ROLES:
        raise RejectedError("unknown_role", repr(message.get(role_key)))
    role = _ROLES[name]
    if not as_is and role in ("assistant", "tool"):
        yield {"role": role, "content": ""}
        return
    text = _text(message.get(text_key))
    match role:
        case "assistant":
            yield read_call(text) if name == "function_call" else read_answer(message, text)
        case "tool":
            yield read_result(message, text)
        case "system" if not text.strip():
            # Many data sets carry an empty system message in every row; it is left out.
            pass
        case _:
            yield {"role": role, "content": text}


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
    # Parquet has types that JSON lacks.
    tools: list[dict[str, Any]] = orjson.loads(orjson.dumps(value, default=str))
    return tools
