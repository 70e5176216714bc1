"""Answers that a source already holds become responses without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.chat.provided import provided_responses
from eagle3.chat.template import Chat, load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.responses import ResponsesSettings
from eagle3.config.samples import SamplesSettings
from eagle3.files.records import Record, read_records, write_json, write_records
from eagle3.prompts.conversations import to_conversation
from eagle3.stages import responses, samples
from eagle3.target.pin import Target, load_target
from tests.engines import targets

USER = {"role": "user", "content": "How many baskets?"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
RESULT = {"role": "tool", "content": "rain"}
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|\0"), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose template opens reasoning in the prompt and blanks it in history."""
    folder = tmp_path_factory.mktemp("target")
    return targets.pin_tokenizer(folder, targets.make_tokenizer())


@pytest.fixture(scope="module")
def chat(target: Path) -> Chat:
    return load_chat(load_target(target))


def prompt(*messages: dict[str, Any], **row: Any) -> Record:
    """Return the prompt that a row of a source becomes."""
    conversation = to_conversation({"messages": list(messages), **row}, "messages", as_is=True)
    return {"id": conversation.id, "source": "s", "messages": conversation.messages, "tools": conversation.tools}


def answers(chat: Chat, *messages: dict[str, Any], tools: Any = None, **template_kwargs: Any) -> list[Record]:
    """Return the turns of one conversation."""
    [record] = provided_responses(chat, [prompt(*messages, tools=tools)], template_kwargs)
    assert record["engine"] == {"name": "given"}
    turns: list[Record] = record["turns"]
    return turns


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def text(chat: Chat, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids, skip_special_tokens=False))


@given(
    content=WORDS,
    reasoning=WORDS.filter(str.strip),
    key=st.sampled_from(["reasoning", "reasoning_content", "thinking", "inline"]),
)
def test_an_answer_is_put_together_as_the_target_would_write_it(
    chat: Chat, content: str, reasoning: str, key: str
) -> None:
    given = answer(f"<think>{reasoning}</think>{content}") if key == "inline" else answer(content, **{key: reasoning})
    [turn] = answers(chat, USER, given)
    expected = chat.encode([f"{reasoning}</think>{content}<|im_end|>"])[0]
    assert turn["token_ids"] == expected
    assert turn["prompt_ids"] == chat.render([USER])
    assert turn["message"] == {"role": "assistant", "content": content, "reasoning": reasoning}
    assert turn["finish_reason"] == "stop"


def test_an_answer_without_reasoning_closes_what_the_prompt_opened(chat: Chat) -> None:
    [turn] = answers(chat, USER, answer("Seven"))
    assert text(chat, turn["token_ids"]) == "</think>Seven<|im_end|>"
    [turn] = answers(chat, USER, answer("Seven"), thinking=False)
    assert text(chat, turn["token_ids"]) == "Seven<|im_end|>"


def test_reasoning_that_the_target_opens_itself(chat: Chat) -> None:
    [turn] = answers(chat, USER, answer("Seven", reasoning="why"), call=True)
    assert text(chat, turn["token_ids"]) == "<think>why</think>Seven<|im_end|>"


def test_later_turns_see_earlier_answers_as_history(chat: Chat) -> None:
    first = answer("Seven", reasoning="count them")
    turns = answers(chat, USER, first, USER, answer("Eight"), USER)
    assert len(turns) == 2
    assert turns[1]["prompt_ids"] == chat.render([USER, first, USER])
    # The template blanks old reasoning; the sample of the first turn has it.
    assert "count" not in text(chat, turns[1]["prompt_ids"])
    assert "count" in text(chat, turns[0]["token_ids"])


class TestTemplateThatShowsReasoning:
    """As Qwen3's: line breaks around reasoning, blanks at the ends of the text go."""

    TEMPLATE = (
        "{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}"
        "<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% if thinking is defined and not thinking %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )

    @pytest.fixture
    def qwen(self, tmp_path: Path) -> Chat:
        folder = tmp_path
        tokenizer = targets.make_tokenizer()
        tokenizer.chat_template = self.TEMPLATE
        tokenizer.save_pretrained(folder)
        config = {"vocab_size": len(tokenizer), "eagle3_eos_token_ids": [tokenizer.eos_token_id]}
        return load_chat(Target(folder, "x", config, trust_remote_code=False))

    @pytest.mark.parametrize(
        "given",
        [
            answer(" Seven", reasoning="count"),
            answer("<think>\ncount\n</think>\n\nSeven"),
            answer("Seven\n", thinking="\ncount"),
        ],
    )
    def test_the_answer_is_what_the_template_writes(self, qwen: Chat, given: dict[str, Any]) -> None:
        [turn] = answers(qwen, USER, given)
        assert text(qwen, turn["token_ids"]) == "<think>\ncount\n</think>\n\nSeven<|im_end|>"
        assert turn["prompt_ids"] == qwen.render([USER])

    def test_without_thinking(self, qwen: Chat) -> None:
        [turn] = answers(qwen, USER, answer("Seven"), thinking=False)
        assert text(qwen, turn["token_ids"]) == "Seven<|im_end|>"


class TestTools:
    CALLED = f"{targets.CALL}<|im_end|>"

    @pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
    def test_calls_and_results_stay(self, chat: Chat, arguments: Any) -> None:
        calls = [{"function": {"name": "weather", "arguments": arguments}}]
        turns = answers(
            chat, USER, answer("", tool_calls=calls), RESULT, answer("Wet."), tools=targets.TOOLS, thinking=False
        )
        assert text(chat, turns[0]["token_ids"]) == self.CALLED
        assert [turn["finish_reason"] for turn in turns] == ["tool_calls", "stop"]
        context = text(chat, turns[1]["prompt_ids"])
        assert "<|im_tool|>tool<|im_middle|>rain<|im_end|>" in context
        assert targets.CALL in context
        assert text(chat, turns[1]["token_ids"]) == "Wet.<|im_end|>"

    @pytest.mark.parametrize("arguments", ["call.function.arguments | items", "(call.function.arguments | tojson)"])
    def test_templates_that_want_arguments_as_a_mapping(self, tmp_path: Path, arguments: str) -> None:
        tokenizer = targets.make_tokenizer()
        written = "{% for k, v in A %}{{ k }}={{ v }}{% endfor %}" if "items" in arguments else "{{ A }}"
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
            f"<|tool_call_begin|>{written.replace('A', arguments)}"
            "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
        )
        tokenizer.save_pretrained(tmp_path)
        chat = load_chat(Target(tmp_path, "x", {"eagle3_eos_token_ids": [0]}, trust_remote_code=False))
        turns = answers(chat, USER, answer("", tool_calls=[CALL]), RESULT, answer("Wet."))
        called = (
            f"<|tool_call_begin|>{'city=Paris' if 'items' in arguments else json.dumps({'city': 'Paris'})}<|im_end|>"
        )
        assert text(chat, turns[0]["token_ids"]) == called
        assert turns[1]["error"] is None
        assert called in text(chat, turns[1]["prompt_ids"])

    def test_the_form_of_sharegpt(self, chat: Chat) -> None:
        call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
        rows = [("human", "a"), ("gpt", "Look."), ("function_call", call), ("observation", "rain"), ("gpt", "Wet.")]
        row = {"conversations": [{"from": name, "value": value} for name, value in rows]}
        conversation = to_conversation(row, "sharegpt", as_is=True)
        record = {"id": conversation.id, "source": "s", "messages": conversation.messages}
        [found] = provided_responses(chat, [record], {"thinking": False})
        assert [text(chat, turn["token_ids"]) for turn in found["turns"]] == [f"Look.{self.CALLED}", "Wet.<|im_end|>"]

    def test_results_get_the_id_of_their_call(self) -> None:
        calls = [{**CALL, "id": "x"}, CALL]
        messages = prompt(USER, answer("", tool_calls=calls), RESULT, RESULT, answer("Wet."))["messages"]
        assert [call["id"] for call in messages[1]["tool_calls"]] == ["x", "functions.weather:1"]
        assert [message["tool_call_id"] for message in messages[2:4]] == ["x", "functions.weather:1"]


class TestFaults:
    @pytest.mark.parametrize(
        ("messages", "code"),
        [
            ((USER, answer("a <|im_end|> b")), "special_token_in_text"),
            ((USER, answer("a", reasoning="</think>")), "special_token_in_text"),
            ((USER, answer("a", tool_calls=[CALL]), {"role": "tool", "content": "<|im_end|>"}, answer("b")), None),
            (({"role": "user", "content": "<|im_user|>"}, answer("a")), "special_token_in_text"),
            ((USER, answer("a", tool_calls=[{**CALL, "id": "<|im_end|>"}])), "special_token_in_text"),
        ],
    )
    def test_text_becomes_no_control_token(self, chat: Chat, messages: Any, code: str | None) -> None:
        turns = answers(chat, *messages, USER, answer("more"))
        # The fault ends the conversation: what follows would have it as history.
        assert turns[-1]["error"].startswith(f"{code or 'special_token_in_text'}: ")
        assert turns[-1]["token_ids"] == turns[-1]["prompt_ids"] == []
        assert len(turns) == (1 if code else 2)

    def test_marks_of_calls_in_the_text_of_an_answer_are_the_targets_own(self, chat: Chat) -> None:
        [turn] = answers(chat, USER, answer(targets.CALL), tools=targets.TOOLS, thinking=False)
        # The template of this target does not write the marks in a plain conversation, but knows them.
        assert text(chat, turn["token_ids"]) == f"{targets.CALL}<|im_end|>"

    @pytest.mark.parametrize(
        ("written", "content"),
        [
            # As SmolLM2's: it does not support calls. As Llama 3.1's: content next to a call is left out.
            ("{{ m.content }}", "Look."),
            ("{{ m.content }}", ""),
            ("{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}", "Look."),
        ],
    )
    def test_a_template_that_leaves_out_a_part_of_the_answer(self, tmp_path: Path, written: str, content: str) -> None:
        tokenizer = targets.make_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}" + written + "<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
        )
        tokenizer.save_pretrained(tmp_path)
        chat = load_chat(Target(tmp_path, "x", {"eagle3_eos_token_ids": [0]}, trust_remote_code=False))
        [turn] = answers(chat, USER, answer(content, tool_calls=[CALL]), RESULT, answer("Wet."))
        assert turn["error"].startswith("answer_not_written: ")
        assert turn["token_ids"] == []

    def test_reasoning_without_marks_for_it(self, tiny_target: Path, tmp_path: Path) -> None:
        pin = {"path": str(tiny_target), "revision": "x", "config": {"eagle3_eos_token_ids": [2]}}
        write_json(tmp_path / "target.json", {**pin, "trust_remote_code": False})
        chat = load_chat(load_target(tmp_path / "target.json"))
        [turn] = answers(chat, USER, answer("a", reasoning="b"))
        assert turn["error"].startswith("no_reasoning_marks: ")


class TestStage:
    def run(self, target: Path, folder: Path, prompts: list[Record], **values: Any) -> list[Record]:
        write_records(folder / "part.jsonl.zst", prompts)
        out = folder / "out"
        out.mkdir(exist_ok=True)
        # An engine that nothing listens for: it must not be needed.
        engine = EngineSettings(name="openai")
        chosen = ResponsesSettings.model_validate(values)
        part = folder / "part.jsonl.zst"
        responses.make(chosen, engine, MachineSettings(), target=target, prompts=part, folder=out)
        return [record for path in sorted(out.glob("shard-*.zst")) for record in read_records(path)]

    def test_no_engine_is_opened(self, target: Path, tmp_path: Path) -> None:
        prompts = sorted(
            (prompt({"role": "user", "content": f"question {n}"}, answer(f"answer {n}")) for n in range(20)),
            key=lambda record: str(record["id"]),
        )
        for shards in (1, 3):
            records = self.run(target, tmp_path, prompts, shards=shards)
            assert sorted(record["id"] for record in records) == [record["id"] for record in prompts]
            assert {record["engine"]["name"] for record in records} == {"given"}
            assert all(turn["error"] is None for record in records for turn in record["turns"])

    def test_they_become_clean_samples(self, target: Path, tmp_path: Path) -> None:
        call = answer("Look.", reasoning="think of it", tool_calls=[CALL])
        asked = prompt(USER, call, RESULT, answer("Wet, bring a coat."), USER, answer(""), tools=targets.TOOLS)
        self.run(target, tmp_path, [asked])
        shard = tmp_path / "out" / "shard-0.jsonl.zst"
        counts = samples.make(SamplesSettings(), target=target, responses=[shard], folder=tmp_path)
        found = list(read_records(tmp_path / "samples.jsonl.zst"))
        assert [(sample["turn"], sample["finish_reason"]) for sample in found] == [(0, "tool_calls"), (1, "stop")]
        assert all(sample["off_policy"] for sample in found)
        chat = load_chat(load_target(target))
        [[start, end]] = found[0]["spans"]
        assert text(chat, found[0]["input_ids"][start:end]) == f"think of it</think>Look.{targets.CALL}<|im_end|>"
        assert counts["rejects"] == {"empty": 1}

    def test_template_kwargs_reach_the_template(self, target: Path, tmp_path: Path) -> None:
        [record] = self.run(target, tmp_path, [prompt(USER, answer("a"))], template_kwargs={"thinking": False})
        chat = load_chat(load_target(target))
        assert record["turns"][0]["prompt_ids"] == chat.render([USER], template_kwargs={"thinking": False})
