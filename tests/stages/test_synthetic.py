"""The target writes user turns itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.artifacts.fingerprint import closure
from eagle3.chat.template import Chat, load_chat
from eagle3.config.configuration import resolve
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.prompts import PromptsSettings
from eagle3.config.synthetic import SyntheticSettings
from eagle3.config.target import TargetSettings
from eagle3.engines.base import Generation, GenerationRequest, Sampling
from eagle3.engines.resumable import ResumableEngine
from eagle3.errors import Eagle3Error
from eagle3.files.records import RecordLog, read_json, read_records
from eagle3.stages import prompts, synthetic
from eagle3.stages import target as target_stage
from eagle3.stages.synthetic import UserTurn, find_user_turn, read_turn
from eagle3.target.pin import load_target
from tests.writers import teach

SCRIPT = """
import sys
from pathlib import Path
from tests.stages.test_synthetic import run
run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run(target: Path, folder: Path, **values: Any) -> dict[str, Any]:
    chosen = {"count": 40, "max_tokens": 40, **values}
    folder.mkdir(exist_ok=True)
    engine = EngineSettings(dtype="float32", batch_size=8)
    return synthetic.make(SyntheticSettings(**chosen), engine, MachineSettings(threads=1), target=target, folder=folder)


def artifact(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    target_stage.make(TargetSettings(model=str(teach(tiny_target, folder / "model"))), folder=folder)
    return folder / "target.json"


@pytest.fixture(scope="module")
def chat(target: Path) -> Chat:
    return load_chat(load_target(target))


@pytest.fixture(scope="module")
def turn(chat: Chat) -> UserTurn:
    return find_user_turn(chat)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(target, folder)
    return folder


class TestUserTurn:
    def test_every_rendered_message_is_between_opening_and_closing(self, chat: Chat, turn: UserTurn) -> None:
        ids = chat.render([{"role": "user", "content": "draw a green hill"}])
        message = chat.tokenizer.encode("draw a green hill")
        assert ids[: len(turn.opening) + len(message) + 1] == [*turn.opening, *message, turn.closing]

    @pytest.mark.parametrize(
        ("template", "opening", "closing"),
        [
            ("<|im_start|>a: {{ messages[0]['content'] }}<|im_end|>", "<|im_start|>a:", "<|im_end|>"),
            # The turn ends where the answer is asked for.
            ("user\n{{ messages[0]['content'] | trim }}\n<|im_start|>assistant", "user\n", "<|im_start|>"),
        ],
    )
    def test_other_templates(self, target: Path, template: str, opening: str, closing: str) -> None:
        chat = load_chat(load_target(target))
        chat.tokenizer.chat_template = template
        found = find_user_turn(chat)
        assert chat.tokenizer.decode(found.opening) == opening
        assert chat.tokenizer.decode([found.closing]) == closing

    def test_a_template_that_refuses_a_lone_message(self, target: Path) -> None:
        chat = load_chat(load_target(target))
        chat.tokenizer.chat_template = "{{ raise_exception('a system message is missing') }}"
        with pytest.raises(Eagle3Error, match="a system message is missing"):
            find_user_turn(chat)

    @pytest.mark.parametrize(
        "template",
        [
            "<|im_start|>{{ messages[0]['content'] | upper }}<|im_end|>",
            "<|im_start|>{{ messages[0]['content'] }} [/INST]",
            "<|im_start|>{{ messages[0]['content'] }} [/INST]<|im_end|>",
            "{{ messages[0]['content'] }}<|im_end|>",
        ],
    )
    def test_a_template_that_does_not_mark_the_end_is_refused(self, target: Path, template: str) -> None:
        chat = load_chat(load_target(target))
        chat.tokenizer.chat_template = template
        with pytest.raises(Eagle3Error, match=r"(?s)cannot write user turns.*another prompt source"):
            find_user_turn(chat)


def answer(ids: Sequence[int]) -> Generation:
    return Generation("turn-1", [], list(ids), "stop", {})


class TestCleaning:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("draw a cat", "truncated"),
            ("<|im_end|>", "empty_message"),
            (" \n<|im_end|>", "empty_message"),
            ("a<|im_start|>b<|im_end|>", "control_token"),
            ("a\0<|im_end|>", "not_text"),
            # No end of a turn here, of this target.
            ("a<|endoftext|>", "control_token"),
        ],
    )
    def test_an_unusable_turn_has_its_reason(self, chat: Chat, turn: UserTurn, text: str, reason: str) -> None:
        found = read_turn(chat, turn, answer(chat.tokenizer.encode(text)))
        assert found["reason"] == reason
        assert found["source"] == "synthetic"
        assert found["record"]["token_ids"]

    def test_half_a_character_is_not_text(self, chat: Chat, turn: UserTurn) -> None:
        ids = chat.tokenizer.encode("é")
        assert len(ids) == 2
        assert read_turn(chat, turn, answer([ids[0], turn.closing]))["reason"] == "not_text"

    def test_what_follows_the_turn_is_not_part_of_it(self, chat: Chat) -> None:
        opens_answer = chat.tokenizer.convert_tokens_to_ids("<|im_start|>")
        ids = chat.tokenizer.encode(" draw a cat \n<|im_start|>assistant\nHere it is<|im_end|>")
        found = read_turn(chat, UserTurn([], opens_answer), answer(ids))
        assert found["messages"] == [{"role": "user", "content": "draw a cat"}]

    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
    @settings(max_examples=100)
    def test_any_text_is_returned_unchanged_or_with_a_reason(self, chat: Chat, turn: UserTurn, text: str) -> None:
        ids = chat.tokenizer.encode(text)
        found = read_turn(chat, turn, answer([*ids, turn.closing]))
        if "reason" in found:
            assert not text.strip() or "\0" in text or "\N{REPLACEMENT CHARACTER}" in text
        else:
            assert found["messages"][0]["content"] == text.strip()


class TestStage:
    def test_turns_in_are_prompts_and_rejects_out(self, made: Path) -> None:
        stats = read_json(made / "stats.json")
        rows = list(read_records(made / "prompts.jsonl.zst"))
        rejects = list(read_records(made / "rejects.jsonl.zst"))
        assert stats["turns"] == 40 == len(rows) + len(rejects)
        assert len(rows) > 20
        assert {row["id"] for row in [*rows, *rejects]} == {f"turn-{number}" for number in range(1, 41)}
        assert len({row["messages"][0]["content"] for row in rows}) > 10

    def test_more_turns_keep_the_earlier_ones(self, target: Path, made: Path, tmp_path: Path) -> None:
        run(target, tmp_path, count=48)
        more = [row["messages"] for row in read_records(tmp_path / "prompts.jsonl.zst")]
        fewer = [row["messages"] for row in read_records(made / "prompts.jsonl.zst")]
        assert more[: len(fewer)] == fewer

    def test_another_seed_gives_others(self, target: Path, made: Path, tmp_path: Path) -> None:
        run(target, tmp_path, seed=1)
        assert artifact(tmp_path) != artifact(made)

    def test_a_kill_costs_no_bytes(self, target: Path, made: Path, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(target), str(tmp_path)], cwd=Path(__file__).parents[2]
        )
        log = tmp_path / ".turns.jsonl"
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = log.read_bytes()
        assert kept
        run(target, tmp_path)
        assert artifact(tmp_path) == artifact(made)
        assert log.read_bytes().startswith(kept)

    def test_a_target_that_never_ends_a_turn_is_an_error_that_says_so(self, target: Path, tmp_path: Path) -> None:
        with pytest.raises(Eagle3Error, match=r"(?s)no usable user turn.*truncated.*synthetic\.max_tokens"):
            run(target, tmp_path, max_tokens=1, count=8)

    def test_the_prompts_stage_takes_them_and_removes_repeated_ones(self, made: Path, tmp_path: Path) -> None:
        chosen = PromptsSettings.model_validate({"sources": [{"synthetic": True}]})
        counts = prompts.make(chosen, synthetic=made / "prompts.jsonl.zst", folder=tmp_path)
        texts = {row["messages"][0]["content"].casefold() for row in read_records(made / "prompts.jsonl.zst")}
        assert counts["prompts"] == len(texts)
        assert counts["rows"] == counts["prompts"] + sum(counts["rejects"].values())
        assert {row["source"] for row in read_records(tmp_path / "part-0.jsonl.zst")} == {"synthetic"}


class _Failing:
    name, versions, batch_size = "failing", {}, None

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        yield Generation(requests[1].id, [], [5], "stop", {})
        yield Generation(requests[0].id, [], [], "error", {}, error="server_error: no")


def test_only_good_answers_are_kept(tmp_path: Path) -> None:
    requests = [GenerationRequest(id=name, messages=[], seed=0) for name in "abc"]
    with RecordLog(tmp_path / "log") as log, pytest.raises(Eagle3Error, match=r"(?s)unanswered.*c"):
        list(ResumableEngine(_Failing(), log).generate(requests, Sampling(1)))  # type: ignore[arg-type]
    with RecordLog(tmp_path / "log") as log:
        assert [record["id"] for record in log.records] == ["b"]


def test_an_edit_of_the_prompts_does_not_affect_the_costly_turns() -> None:
    modules = {node.module for node in closure(["eagle3.stages.synthetic"])}
    assert "eagle3.stages.synthetic" in modules
    assert not [name for name in modules if name.startswith(("eagle3.prompts", "eagle3.stages.prompts"))]


def test_an_endpoint_without_token_ids_is_refused_before_anything_runs() -> None:
    values = {"run": "r", "prompts": {"sources": [{"synthetic": True}]}, "engine": {"name": "openai"}}
    with pytest.raises(Eagle3Error, match=r"(?s)cannot write prompts.*`engine\.name` to vllm or transformers"):
        resolve(values)


@pytest.mark.parametrize(
    "sources",
    [[{"synthetic": True}, {"synthetic": True}], [{"synthetic": True, "path": "a"}], [{"synthetic": False}], [{}]],
)
def test_a_source_is_exactly_one_thing_and_only_one_is_synthetic(sources: list[dict[str, Any]]) -> None:
    with pytest.raises(Eagle3Error, match="synthetic: true"):
        resolve({"run": "r", "prompts": {"sources": sources}})
