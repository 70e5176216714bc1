"""Rebuilding generated ids from the text of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.chat.rebuild import rebuild
from eagle3.chat.template import Chat, load_chat
from eagle3.engines.base import GenerationRequest
from eagle3.errors import RejectedError
from eagle3.target.pin import Target
from tests.engines import targets

CALLS = [{"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("target")
    targets.make_tokenizer().save_pretrained(folder)
    return load_chat(Target(folder, "test", {"eagle3_eos_token_ids": [0]}, trust_remote_code=False))


def ask(**template_kwargs: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "How many baskets?"}]
    return GenerationRequest(id="a", messages=messages, seed=0, tools=targets.TOOLS, template_kwargs=template_kwargs)


def attempt(chat: Chat, request: GenerationRequest, text: str, finish_reason: str = "stop", **message: Any) -> None:
    """Assert that the ids of `text` come out of the message that stands for it."""
    expected = chat.tokenizer.encode(text, add_special_tokens=False)
    prompt = chat.render(request.messages, tools=request.tools, template_kwargs=request.template_kwargs)
    answer = {"role": "assistant", "content": "", **message}
    assert rebuild(chat, request, prompt, answer, finish_reason, len(expected)) == expected


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|"), min_size=1, max_size=40)


@given(reasoning=WORDS, content=WORDS)
def test_reasoning_and_content(chat: Chat, reasoning: str, content: str) -> None:
    attempt(chat, ask(), f"{reasoning}</think>{content}<|im_end|>", reasoning=reasoning, content=content)


@given(content=WORDS)
def test_without_reasoning(chat: Chat, content: str) -> None:
    attempt(chat, ask(thinking=False), f"{content}<|im_end|>", content=content)
    attempt(chat, ask(), f"</think>{content}<|im_end|>", content=content)


def test_reasoning_that_the_target_opens_itself(chat: Chat) -> None:
    attempt(chat, ask(call=True), "<think>why</think>so<|im_end|>", reasoning="why", content="so")


def test_cut_off_in_the_reasoning(chat: Chat) -> None:
    attempt(chat, ask(), "some apples", "length", reasoning="some apples")


def test_cut_off_just_after_the_reasoning(chat: Chat) -> None:
    attempt(chat, ask(), "some apples</think>", "length", reasoning="some apples")


def test_cut_off_in_the_content(chat: Chat) -> None:
    attempt(chat, ask(), "some apples</think>Seven", "length", reasoning="some apples", content="Seven")


@pytest.mark.parametrize("content", ["", "Seven baskets"])
@pytest.mark.parametrize("closing", ["", "</think>"], ids=["call-ends-reasoning", "closed"])
def test_tool_calls(chat: Chat, content: str, closing: str) -> None:
    calls = json.loads(json.dumps(CALLS))
    calls[0]["function"]["arguments"] = '{"city": "Paris"}'
    text = f"look outside{closing}{content}{targets.CALL}<|im_end|>"
    attempt(chat, ask(), text, "tool_calls", reasoning="look outside", content=content, tool_calls=calls)


def test_a_count_that_does_not_match_is_refused(chat: Chat) -> None:
    request = ask()
    prompt = chat.render(request.messages)
    with pytest.raises(RejectedError, match=r"the endpoint counted 99") as caught:
        rebuild(chat, request, prompt, {"role": "assistant", "content": "Seven"}, "stop", 99)
    assert caught.value.code == "rebuilt_length"
