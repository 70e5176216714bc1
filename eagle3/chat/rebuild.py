"""Token ids from text, for endpoints that return none.

The generated ids are assembled from the parts of the answer: reasoning, its end mark, content, tool calls,
end of turn. Every special token becomes its single id; the text between them is tokenised piece by piece. The
result must have as many tokens as the endpoint counted, or the answer is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eagle3.chat.message import ChatPrompt
from eagle3.chat.template import Chat, with_mapping
from eagle3.errors import RejectedError
from eagle3.records import Message

# A placeholder for the content while the template writes what follows it.
_CONTENT = "\u241f content \u241f"


def rebuild(
    chat: Chat,
    request: ChatPrompt,
    prompt_ids: Sequence[int],
    message: Message,
    finish_reason: str,
    count: int,
) -> list[int]:
    """Return the ids that the target generated.

    Args:
        chat: the target's tokenizer and template.
        request: what was asked.
        prompt_ids: the prompt, as rendered for generation.
        message: the answer: content, reasoning, tool_calls.
        finish_reason: `length` means that the answer was cut off: it has no end of turn.
        count: the endpoint's number of generated tokens.

    Raises:
        RejectedError: `rebuilt_length`: no way to put the parts together has `count` tokens.
    """
    reasoning, content = chat.encode([message.get("reasoning") or "", message["content"]])
    tails = [[]] if finish_reason == "length" else list(_tails(chat, request, message))
    lengths = []
    for head in heads(chat, prompt_ids, reasoning):
        for tail in tails:
            ids = [*head, *content, *tail]
            if len(ids) == count:
                return ids
            lengths.append(len(ids))
    raise RejectedError("rebuilt_length", f"{' or '.join(map(str, lengths))} tokens, the endpoint counted {count}")


def heads(chat: Chat, prompt_ids: Sequence[int], reasoning: list[int]) -> Iterator[list[int]]:
    """Yield the ids that may come before the content, the likelier ones first."""
    if chat.reasoning_ids is None:
        yield reasoning
        return
    opening, closing = chat.reasoning_ids
    begun = chat.opens_reasoning(prompt_ids)
    if not begun and not reasoning:
        yield []
        return
    start = [] if begun else [opening]
    # Without an end mark: cut off in the reasoning, or a tool call has ended it.
    yield [*start, *reasoning, closing]
    yield [*start, *reasoning]


def _tails(chat: Chat, request: ChatPrompt, message: Message) -> Iterator[list[int]]:
    """Yield the ids that may follow the content, end of turn included, as the template writes them."""
    text = after_content(chat, request, message)
    for ids in chat.encode([*dict.fromkeys((text, text.lstrip()))]):
        yield until_end(chat, ids)


def until_end(chat: Chat, ids: list[int]) -> list[int]:
    """Return ids up to the end of the turn, which is added if the template writes none."""
    end = next((place for place, id in enumerate(ids) if id in chat.stop_ids), None)
    return ids[: end + 1] if end is not None else [*ids, min(chat.stop_ids)]


def after_content(chat: Chat, request: ChatPrompt, message: Message) -> str:
    """Return what follows the content of a finished answer: tool calls, and the end of the turn.

    Raises:
        RejectedError: the template refuses the answer, or leaves out the content next to tool calls.
    """
    answer: Message = {"role": "assistant", "content": _CONTENT, "tool_calls": message.get("tool_calls") or []}
    _, found, rest = finished_text(chat, request, answer).rpartition(_CONTENT)
    if not found:
        raise RejectedError("answer_not_written", "the chat template leaves out the text of an answer")
    return rest


def finished_text(chat: Chat, request: ChatPrompt, message: Message) -> str:
    """Return the conversation with its answer as the template writes it, arguments of calls word for word.

    Raises:
        RejectedError: the template refuses the answer.
    """
    calls = message.get("tool_calls") or []
    arguments = [call["function"]["arguments"] for call in calls]
    try:
        text = _render(chat, request, message, calls)
        if all(argument in text for argument in arguments):
            return text
    except RejectedError:
        if not calls:
            raise
    # A template that wants the arguments as a mapping has quoted the string, or failed.
    return _render(chat, request, message, [with_mapping(call) for call in calls])


def _render(chat: Chat, request: ChatPrompt, message: Message, calls: list[dict[str, Any]]) -> str:
    answer = message.copy()
    answer.pop("tool_calls", None)
    if calls:
        answer["tool_calls"] = calls
    return chat.write(request.messages, answer, request.tools, request.template_kwargs)
