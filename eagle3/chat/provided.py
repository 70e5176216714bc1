"""Provided answers: the answers that a source itself holds become responses, without an engine.

Prompts are rendered as for an engine, so later turns see earlier answers as history. The ids of an answer are what
the template writes for it; where it leaves out the reasoning, as many do, they are rebuilt as for an endpoint that
returns text. Such answers are off-policy: another model or a person may have written them, so their records name the
engine `given`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, NamedTuple

from eagle3.chat.message import ChatPrompt
from eagle3.chat.rebuild import after_content, finished_text, heads, until_end
from eagle3.chat.template import Chat
from eagle3.console import Progress
from eagle3.errors import RejectedError
from eagle3.records import Message, Prompt, Response, Turn

NAME = "given"

# Conversations at a time: enough text to keep all cores busy, little enough to fit in memory.
_BATCH = 256


def has_answers(prompt: Prompt) -> bool:
    """Whether a prompt holds its answers already."""
    return any(message["role"] == "assistant" for message in prompt["messages"])


def provided_responses(chat: Chat, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any]) -> Iterator[Response]:
    """Yield one response per prompt, in order.

    A turn that cannot be used has an `error`, and the conversation ends with it: `special_token_in_text` and
    `template_error` as for an engine, `no_reasoning_marks` if the target has no tokens around reasoning, and
    `answer_not_written` if its template leaves out a part of the answer.
    """
    with Progress(len(prompts), "provided answers", "conversations") as bar, ThreadPoolExecutor(1) as pool:
        waiting: deque[tuple[list[tuple[Prompt, list[_Answer]]], Future[list[list[int]]]]] = deque()
        for start in range(0, len(prompts), _BATCH):
            batch = [(prompt, _turns(chat, prompt, template_kwargs)) for prompt in prompts[start : start + _BATCH]]
            texts = [text for _, turns in batch for turn in turns for text in turn.texts]
            # One batch is tokenised while the next is rendered and the last one written.
            waiting.append((batch, pool.submit(chat.encode, texts)))
            while len(waiting) > (start + _BATCH < len(prompts)):
                finished, encoded = waiting.popleft()
                ids = iter(encoded.result())
                for prompt, turns in finished:
                    bar.update(1)
                    records = [_record(chat, turn, list(islice(ids, len(turn.texts)))) for turn in turns]
                    yield {"id": prompt["id"], "source": prompt["source"], "engine": {"name": NAME}, "turns": records}


class _Answer(NamedTuple):
    """One answer and its context, before tokenising."""

    request: ChatPrompt
    message: Message
    texts: tuple[str, ...] = ()
    """Prompt and answer; or prompt, reasoning, content, and what follows it."""
    error: str | None = None


def _turns(chat: Chat, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> list[_Answer]:
    turns: list[_Answer] = []
    for place, message in enumerate(prompt["messages"]):
        if message["role"] != "assistant":
            continue
        request = ChatPrompt(
            messages=prompt["messages"][:place],
            tools=prompt.get("tools"),
            template_kwargs=dict(template_kwargs),
        )
        try:
            _check(chat, message)
            asked = chat.render_text(request.messages, tools=request.tools, template_kwargs=template_kwargs)
            turns.append(_Answer(request, message, (asked, *_answer(chat, request, message, asked))))
        except RejectedError as error:
            turns.append(_Answer(request, message, error=str(error)))
            break
    return turns


def _answer(chat: Chat, request: ChatPrompt, message: Message, asked: str) -> tuple[str, ...]:
    """Return the answer's text if the template writes all of it after the prompt, else its parts."""
    reasoning, content = message.get("reasoning", ""), message["content"]
    finished = finished_text(chat, request, message)
    without_calls = message.copy()
    without_calls.pop("tool_calls", None)
    if "tool_calls" in message and finished == finished_text(chat, request, without_calls):
        raise RejectedError("answer_not_written", "the chat template leaves out tool calls")
    written = finished.removeprefix(asked)
    thought, said = "", written
    opening, closing = map(chat.control.__getitem__, chat.reasoning_ids) if chat.reasoning_ids else ("", "")
    if closing and closing in written:
        thought, _, said = written.partition(closing)
    whole = thought.removeprefix(opening).strip() == reasoning.strip() and said.lstrip().startswith(content.strip())
    if finished.startswith(asked) and whole:
        return (written,)
    return reasoning, content, after_content(chat, request, message)


def _check(chat: Chat, message: Message) -> None:
    """Check that no text becomes a control token, except those that the target itself writes around tool calls."""
    reasoning = message.get("reasoning", "")
    if reasoning and chat.reasoning_ids is None:
        raise RejectedError("no_reasoning_marks", "the answer has reasoning, but the target has no tokens to mark it")
    calls = [(call["id"], *call["function"].values()) for call in message.get("tool_calls", ())]
    for text in (message["content"], reasoning, *chain.from_iterable(calls)):
        if (found := chat.control_in(text)) and (wrong := [mark for mark in found if mark not in chat.marks]):
            raise RejectedError("special_token_in_text", f"{wrong[0]!r} in an assistant message")


def _record(chat: Chat, turn: _Answer, encoded: list[list[int]]) -> Turn:
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    finish = "error"
    if turn.error is None:
        prompt_ids, *answer = encoded
        if len(answer) == 1:
            token_ids = until_end(chat, answer[0])
        else:
            reasoning, content, rest = answer
            token_ids = [*next(heads(chat, prompt_ids, reasoning)), *content, *until_end(chat, rest)]
        finish = "tool_calls" if "tool_calls" in turn.message else "stop"
    request = turn.request
    asked = {"messages": request.messages, "template_kwargs": request.template_kwargs, "tools": request.tools}
    return {
        "request": asked,
        "prompt_ids": prompt_ids,
        "token_ids": token_ids,
        "finish_reason": finish,
        "message": turn.message,
        "raw": {},
        "error": turn.error,
    }
