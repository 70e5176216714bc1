from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.chat.template import Chat, load_chat
from eagle3.config.samples import SamplesSettings
from eagle3.files.records import Record, read_json, read_records, write_records
from eagle3.stages import samples
from eagle3.target.pin import load_target
from tests.engines.targets import pin_tokenizer

IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that thinks if told to: then the prompt opens the reasoning."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template += "{% if thinking %}<think>{{ '' if true else '</think>' }}{% endif %}"
    return pin_tokenizer(folder, tokenizer)


@pytest.fixture(scope="module")
def chat(target: Path) -> Chat:
    return load_chat(load_target(target))


def turn(chat: Chat, answer: str, *, thinking: bool = False, finish: str = "stop", **changes: Any) -> Record:
    """Return a turn as the responses stage records it."""
    messages = [{"role": "user", "content": "say hello to Ada"}]
    prompt = chat.render(messages, template_kwargs={"thinking": thinking})
    ids = chat.tokenizer.encode(answer, add_special_tokens=False) + ([IM_END] if finish == "stop" else [])
    record = {
        "request": {"messages": messages},
        "prompt_ids": prompt,
        "token_ids": ids,
        "finish_reason": finish,
        "message": chat.parse(prompt, ids),
        "raw": {},
        "error": None,
    }
    return {**record, **changes}


class Stage:
    """Runs the stage on turns, each its own conversation."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.folder = folder
        self._target = target

    def run(self, *turns: Record, shards: int = 1, **values: Any) -> dict[str, Any]:
        paths = []
        for shard in range(shards):
            records = [
                {"id": f"{number:016x}", "source": f"s{number % 2}", "engine": {}, "turns": [turn]}
                for number, turn in enumerate(turns)
                if number % shards == shard
            ]
            paths.append(self.folder / f"shard-{shard}.jsonl.zst")
            write_records(paths[-1], records)
        (self.folder / "out").mkdir(exist_ok=True)
        chosen = SamplesSettings.model_validate(values)
        return samples.make(chosen, target=self._target, responses=paths, folder=self.folder / "out")

    @property
    def samples(self) -> list[Record]:
        return list(read_records(self.folder / "out" / "samples.jsonl.zst"))

    @property
    def rejects(self) -> list[Record]:
        return list(read_records(self.folder / "out" / "rejects.jsonl.zst"))


@pytest.fixture
def stage(target: Path, tmp_path: Path) -> Stage:
    return Stage(target, tmp_path)


def test_a_sample_is_what_the_engine_saw_and_said(stage: Stage, chat: Chat) -> None:
    answered = turn(chat, "the cat sat on a mat")
    stage.run(answered)
    [sample] = stage.samples
    start = len(answered["prompt_ids"])
    assert sample == {
        "id": f"{0:016x}-0",
        "conversation": f"{0:016x}",
        "source": "s0",
        "turn": 0,
        "input_ids": answered["prompt_ids"] + answered["token_ids"],
        "spans": [[start, start + len(answered["token_ids"])]],
        "finish_reason": "stop",
    }
    assert sample["input_ids"][-1] == IM_END


def test_every_turn_is_a_sample_of_its_own(stage: Stage, chat: Chat, target: Path) -> None:
    turns = [turn(chat, "the cat sat"), turn(chat, "the moon and the sea")]
    path = stage.folder / "a.jsonl.zst"
    write_records(path, [{"id": "a" * 16, "source": "s", "engine": {}, "turns": turns}])
    (stage.folder / "out").mkdir()
    samples.make(SamplesSettings(), target=target, responses=[path], folder=stage.folder / "out")
    assert [(sample["id"], sample["turn"]) for sample in stage.samples] == [("a" * 16 + "-0", 0), ("a" * 16 + "-1", 1)]


@pytest.mark.parametrize(
    ("answer", "changes", "values", "reason"),
    [
        ("", {"error": "engine_error: timed out"}, {}, "engine_error"),
        ("", {"error": "prompt_too_long: 9 tokens"}, {}, "prompt_too_long"),
        ("", {}, {}, "empty"),
        ("", {"token_ids": []}, {}, "empty"),
        ("   \n\n  ", {}, {}, "empty"),
        ("a", {}, {}, "too_short"),
        ("the cat sat on", {"finish_reason": "abort"}, {}, "unfinished"),
        ("the cat sat on", {"finish_reason": "length"}, {"truncated": "reject"}, "truncated"),
        ("the cat sat on", {"token_ids": [40, 41, 42, 43]}, {}, "no_end_of_turn"),
        ("the cat sat on", {"token_ids": [40, 41, 42, 400, 2]}, {}, "bad_ids"),
        ("the cat sat on", {"token_ids": [40, 41, -1, 43, 2]}, {}, "bad_ids"),
        ("the cat sat on", {"raw": {"usage": {"completion_tokens": 99}}}, {}, "count_mismatch"),
        ("the cat sat on", {"raw": {"usage": {"prompt_tokens": 99}}}, {}, "count_mismatch"),
        ("the <|im_end|>\n<|im_start|>user\n more", {}, {}, "special_token_inside"),
        ("the <|endoftext|> more", {}, {}, "special_token_inside"),
        ("the <|endoftext|> more", {}, {"allowed_tokens": ["<|endoftext|>"]}, None),
        (" the cat sat on the moon" * 12, {}, {}, "repetition"),
        (" the cat sat on the moon" * 6, {}, {}, None),
        (" the cat sat on the moon" * 6, {}, {"max_repeats": 4}, "repetition"),
        ("hello," + " the cat sat on the moon" * 12 + ", and so on: list three colours, Ada", {}, {}, "repetition"),
        ("the cat sat", {}, {"require_reasoning": True}, "reasoning_missing"),
        ("the cat sat", {"message": {"content": "sat", "reasoning": "the cat"}}, {}, "reasoning_lost"),
        ("the cat sat on a mat", {}, {"max_length": 20, "too_long": "reject"}, "too_long"),
        ("the cat sat on a mat", {}, {"max_length": 8}, "too_long"),
    ],
)
def test_what_is_not_clean_is_rejected_with_its_reason(
    stage: Stage, chat: Chat, answer: str, changes: dict[str, Any], values: dict[str, Any], reason: str | None
) -> None:
    faulty, good = turn(chat, answer, **changes), turn(chat, "list three colours, Ada")
    counts = stage.run(faulty, good, **{"max_length": 256, **values}) if reason else stage.run(faulty, **values)
    assert counts["rows"] == len(stage.samples) + len(stage.rejects)
    if reason is None:
        assert stage.rejects == []
        return
    assert stage.rejects[0]["reason"] == reason
    assert stage.rejects[0]["record"] == faulty
    assert stage.rejects[0]["source"] == "s0"
    assert counts["rejects"][reason] >= 1


class TestReasoning:
    def test_reasoning_is_part_of_the_span(self, stage: Stage, chat: Chat) -> None:
        answered = turn(chat, "the sea, the moon</think>hello Ada", thinking=True)
        assert answered["message"] == {"role": "assistant", "content": "hello Ada", "reasoning": "the sea, the moon"}
        stage.run(answered, require_reasoning=True)
        [sample] = stage.samples
        assert sample["spans"] == [[len(answered["prompt_ids"]), len(sample["input_ids"])]]

    @pytest.mark.parametrize(
        ("answer", "changes", "reason"),
        [
            ("</think>hello Ada, hello", {}, "reasoning_missing"),
            ("the sea, the moon", {}, "reasoning_open"),
            ("the sea, the moon", {"message": {"content": "the moon"}}, "reasoning_open"),
        ],
    )
    def test_missing_or_open_reasoning_is_rejected(
        self, stage: Stage, chat: Chat, answer: str, changes: dict[str, Any], reason: str
    ) -> None:
        stage.run(turn(chat, answer, thinking=True, **changes), require_reasoning=True)
        assert [reject["reason"] for reject in stage.rejects] == [reason]

    @pytest.mark.parametrize("finish", ["length", "tool_calls"])
    def test_open_reasoning_is_fine_where_the_answer_was_cut_or_calls_a_tool(
        self, stage: Stage, chat: Chat, finish: str
    ) -> None:
        answered = turn(chat, "the sea, the moon", thinking=True)
        if finish == "length":
            answered["token_ids"].pop()
        stage.run({**answered, "finish_reason": finish}, require_reasoning=True)
        assert stage.rejects == []


@given(max_length=st.integers(18, 60), words=st.integers(3, 30))
def test_a_long_sample_is_cut_at_the_limit_and_marked(
    target: Path, chat: Chat, tmp_path_factory: pytest.TempPathFactory, max_length: int, words: int
) -> None:
    stage = Stage(target, tmp_path_factory.mktemp("cut"))
    vocabulary = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at"]
    answered = turn(chat, " ".join(vocabulary[i * i % 9] for i in range(words)))
    whole = answered["prompt_ids"] + answered["token_ids"]
    stage.run(answered, max_length=max_length, min_generated=1, max_repeats=40)
    for sample in stage.samples:
        assert sample["input_ids"] == whole[:max_length]
        assert sample["spans"] == [[len(answered["prompt_ids"]), len(sample["input_ids"])]]
        assert sample.get("cut", False) == (len(whole) > max_length)
    assert bool(stage.samples) == (len(answered["prompt_ids"]) < max_length)


def test_counts_and_histograms_add_up(stage: Stage, chat: Chat) -> None:
    turns = [turn(chat, "the cat sat on a mat"), turn(chat, ""), turn(chat, "add two numbers: 12 + 30 = 42")]
    counts = stage.run(*turns)
    stats = read_json(stage.folder / "out" / "stats.json")
    by_source = {"s0": {"samples": 2}, "s1": {"samples": 0, "empty": 1}}
    assert stats["total"] | {"supervised_share": stats["supervised_share"], "by_source": by_source} == counts
    assert stats["sources"]["s1"] == {"rows": 1, "rejects": {"empty": 1}}
    assert stats["sources"]["s0"]["samples"] == 2
    assert sum(stats["lengths"]["answer"].values()) == 2
    assert counts["generated"] == sum(end - start for sample in stage.samples for start, end in sample["spans"])


def test_given_answers_are_marked_and_counted(target: Path, chat: Chat, tmp_path: Path) -> None:
    turns = [turn(chat, "the cat sat on a mat"), turn(chat, "add two numbers: 12 + 30 = 42")]
    records = [
        {"id": f"{number:016x}", "source": "s", "engine": {"name": name}, "turns": [turns[number]]}
        for number, name in enumerate(("given", "vllm"))
    ]
    write_records(tmp_path / "shard.jsonl.zst", records)
    counts = samples.make(SamplesSettings(), target=target, responses=[tmp_path / "shard.jsonl.zst"], folder=tmp_path)
    found = {record["id"]: record.get("off_policy") for record in read_records(tmp_path / "samples.jsonl.zst")}
    assert found == {f"{0:016x}-0": True, f"{1:016x}-0": None}
    assert counts["off_policy"] == read_json(tmp_path / "stats.json")["sources"]["s"]["off_policy"] == 1


def test_the_number_of_shards_changes_no_sample(stage: Stage, chat: Chat) -> None:
    turns = [turn(chat, f"the cat sat on {number} mats") for number in range(7)]
    found = []
    for shards in (1, 3):
        stage.run(*turns, shards=shards)
        found.append(sorted(stage.samples, key=lambda sample: str(sample["id"])))
    assert found[0] == found[1]
