"""Roles: who wrote which token of a sample, found by the headers that the chat template writes before messages.

For display only; training does not use it. A header of plain words may share a token with the text, and be missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from eagle3.chat.template import Chat
from eagle3.errors import RejectedError
from eagle3.records import Message, Sample

ROLES = ("system", "user", "tool", "history", "reasoning", "answer", "special")

# Messages of a probe: text that no template writes.
_MARK = "\u241f{}\u241f"
_CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Segment(NamedTuple):
    """Neighbouring tokens of one role."""

    role: str
    """One of `ROLES`: `history` is an earlier answer, `special` a control token."""
    generated: bool
    """Whether they lie in a span, and so are trained on."""
    text: str
    tokens: int


class Roles:
    """Finds the roles of the tokens in the samples of one target."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        found = {role: header for role, text in _headers(chat).items() if (header := self._ids(role, text))}
        self._headers = sorted(((header, role) for role, header in found.items()), key=lambda entry: -len(entry[0]))

    def segments(self, sample: Sample) -> list[Segment]:
        """Return the segments of a sample, in order; all tokens are in one of them."""
        ids = sample["input_ids"]
        roles = list(self._prompt(ids[: sample["spans"][0][0]]))
        for start, end in sample["spans"]:
            # What lies between two spans belongs to the prompt of the second.
            roles += list(self._prompt(ids[:start]))[len(roles) :]
            roles += self._answer(ids[:start], ids[start:end])
        roles += ["special" if id in self._chat.control else "history" for id in ids[len(roles) :]]
        inside = [any(start <= place < end for start, end in sample["spans"]) for place in range(len(ids))]
        segments = []
        for (role, generated), group in groupby(range(len(ids)), lambda place: (roles[place], inside[place])):
            places = list(group)
            segments.append(Segment(role, generated, self._text(ids[places[0] : places[-1] + 1]), len(places)))
        return segments

    def _prompt(self, ids: Sequence[int]) -> Iterator[str]:
        role = "system"
        for place, id in enumerate(ids):
            for header, name in self._headers:
                if header[0] == id and header == ids[place : place + len(header)]:
                    role = name
                    break
            yield "special" if id in self._chat.control else role

    def _answer(self, prompt: Sequence[int], ids: list[int]) -> list[str]:
        reasoning, _ = self._chat.split_reasoning(prompt, ids)
        marks = self._chat.reasoning_ids
        start = int(bool(ids and marks and reasoning is not None and ids[0] == marks[0]))
        thought = range(start, start + len(reasoning or ()))
        named = ("reasoning" if place in thought else "answer" for place in range(len(ids)))
        return ["special" if id in self._chat.control else name for id, name in zip(ids, named, strict=True)]

    def _ids(self, role: str, text: str) -> list[int]:
        """Tokenise a header without trailing whitespace, which may become part of the text's first token."""
        ids = self._chat.encode([text])[0]
        marks = self._chat.reasoning_ids or ()
        while ids and (not self._text(ids[-1:]).strip() or (role == "history" and ids[-1] in marks)):
            ids.pop()
        return ids

    def _text(self, ids: list[int]) -> str:
        text = self._chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def _headers(chat: Chat) -> dict[str, str]:
    """Return, per role, what the template writes before each of its messages, whatever came earlier."""
    turn = ("user", "assistant")
    probes = (turn * 2, ("system", *turn * 2), ("user", "call", "tool", "tool", *turn))
    found: dict[str, list[str]] = {}
    for probe in probes:
        for role, header in _probe(chat, probe):
            found.setdefault(role, []).append(header)
    headers = {role: _common([text[::-1] for text in texts])[::-1] for role, texts in found.items()}
    if "assistant" in headers:
        # An answer in the history may begin differently from a requested one: with empty reasoning.
        asked = [header for role, header in _probe(chat, ("user",), ask=True) if role == "assistant"]
        headers["history"] = _common([headers.pop("assistant"), *asked])
    return headers


def _probe(chat: Chat, roles: Sequence[str], *, ask: bool = False) -> Iterator[tuple[str, str]]:
    """Render a conversation of marks; yield role and header of every message, and of the answer asked for."""
    messages = [_message(role, _MARK.format(number)) for number, role in enumerate(roles)]
    try:
        rest = chat.apply(messages, None, {}, generate=ask)
    except RejectedError:
        return
    for role, message in zip(roles, messages, strict=True):
        header, mark, rest = rest.partition(message["content"])
        if mark:
            yield "assistant" if role == "call" else role, header
    if ask:
        yield "assistant", rest


def _message(role: str, text: str) -> Message:
    if role == "call":
        return {"role": "assistant", "content": text, "tool_calls": [_CALL, {**_CALL, "id": "functions.f:1"}]}
    if role == "tool":
        return {"role": role, "content": text, "tool_call_id": str(_CALL["id"]), "name": "f"}
    return {"role": role, "content": text}


def _common(texts: list[str]) -> str:
    """Return the common prefix of all texts."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)
