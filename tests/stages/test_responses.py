from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.chat.template import load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.responses import ResponsesSettings
from eagle3.config.target import TargetSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_records, write_records
from eagle3.prompts.conversations import Conversation
from eagle3.stages import responses
from eagle3.stages import target as target_stage
from eagle3.target.pin import load_target
from tests.stages.toy_engine import ToyEngine

Stage = Callable[..., dict[str, Any]]
SCRIPT = Path(__file__).with_name("toy_engine.py")


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target_stage.make(TargetSettings(model=str(tiny_target)), folder=folder)
    return folder / "target.json"


def prompt(*texts: str, system: str | None = None) -> Record:
    head = [{"role": "system", "content": system}] if system else []
    conversation = Conversation([*head, *({"role": "user", "content": text} for text in texts)], None)
    return {"id": conversation.id, "source": "s", "messages": conversation.messages}


PROMPTS = sorted(
    [
        prompt(*(f"turn {turn} of {number}, {'the cat ' * (number % 7)}" for turn in range(1 + number % 3)))
        for number in range(30)
    ],
    key=lambda record: str(record["id"]),
)


@pytest.fixture
def engine(target: Path) -> ToyEngine:
    return ToyEngine(load_target(target), None)


@pytest.fixture
def stage(target: Path, tmp_path: Path, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Run the stage with the toy engine."""
    monkeypatch.setattr(responses, "open_engine", lambda *_: engine)

    def run(prompts: list[Record], folder: str = "out", **values: Any) -> dict[str, Any]:
        write_records(tmp_path / "part.jsonl.zst", prompts)
        (tmp_path / folder).mkdir(exist_ok=True)
        return responses.make(
            ResponsesSettings.model_validate({"max_tokens": 12, **values}),
            EngineSettings(),
            MachineSettings(),
            target=target,
            prompts=tmp_path / "part.jsonl.zst",
            folder=tmp_path / folder,
        )

    return run


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.zst"))}


def records(folder: Path) -> list[Record]:
    return [record for path in sorted(folder.glob("shard-*.zst")) for record in read_records(path)]


def test_later_turns_see_the_targets_own_answers(stage: Stage, tmp_path: Path) -> None:
    counts = stage([prompt("one", "two", "three", system="Be brief.")])
    [record] = records(tmp_path / "out")
    assert [len(turn["request"]["messages"]) for turn in record["turns"]] == [2, 4, 6]
    for before, after in zip(record["turns"], record["turns"][1:], strict=False):
        assert after["request"]["messages"][:-2] == before["request"]["messages"]
        assert after["request"]["messages"][-2] == before["message"]
    assert len({turn["request"]["seed"] for turn in record["turns"]}) == 3
    assert record["engine"] == {"name": "toy", "toy": "1"}
    assert counts["answers"] == 3
    assert counts["generated_tokens"] == sum(len(turn["token_ids"]) for turn in record["turns"])


def test_provided_answers_are_kept_next_to_generated_ones(stage: Stage, tmp_path: Path) -> None:
    told = [{"role": "user", "content": "four"}, {"role": "assistant", "content": "the cat sat"}]
    held = [{"id": f"{number}" * 16, "source": "given", "messages": told} for number in (0, 8)]
    prompts = sorted([*PROMPTS[:4], *held], key=lambda record: str(record["id"]))
    stage(prompts, shards=2)
    found = records(tmp_path / "out")
    assert sorted(record["id"] for record in found) == [record["id"] for record in prompts]
    assert {record["engine"]["name"] for record in found if record["source"] == "given"} == {"given"}
    assert {record["engine"]["name"] for record in found if record["source"] == "s"} == {"toy"}
    for path in (tmp_path / "out").glob("shard-*.zst"):
        ids = [record["id"] for record in read_records(path)]
        assert ids == sorted(ids)


def test_every_prompt_has_one_record_in_a_sorted_shard(stage: Stage, tmp_path: Path) -> None:
    stage(PROMPTS, shards=3)
    shards = shard_bytes(tmp_path / "out")
    assert len(shards) == 3
    for name in shards:
        ids = [record["id"] for record in read_records(tmp_path / "out" / name)]
        assert ids
        assert ids == sorted(ids)
    found = {record["id"]: len(record["turns"]) for record in records(tmp_path / "out")}
    assert found == {record["id"]: len(record["messages"]) for record in PROMPTS}


def test_the_prompts_of_one_part_fill_all_shards(stage: Stage, tmp_path: Path) -> None:
    part = [prompt(f"question {number}") for number in range(200)]
    part = sorted((record for record in part if record["id"] < "2"), key=lambda record: str(record["id"]))
    stage(part, shards=3)
    assert all(any(read_records(tmp_path / "out" / name)) for name in shard_bytes(tmp_path / "out"))


def test_waves_run_short_prompts_first_in_groups_within_a_shard(
    stage: Stage, engine: ToyEngine, tmp_path: Path
) -> None:
    engine.batch_size = 4
    stage(PROMPTS, shards=2)
    shard_of = {
        record["id"]: name for name in shard_bytes(tmp_path / "out") for record in read_records(tmp_path / "out" / name)
    }
    waves: dict[tuple[str, str], list[int]] = {}
    for group in engine.groups:
        conversations, turns = zip(*(request.id.split("-") for request in group), strict=True)
        [turn], [shard] = set(turns), {shard_of[id] for id in conversations}
        waves.setdefault((turn, shard), []).extend(len(request.messages[-1]["content"]) for request in group)
    assert len(waves) == 3 * 2
    assert all(lengths == sorted(lengths) for (turn, _), lengths in waves.items() if turn == "0")
    assert max(len(group) for group in engine.groups) == 4


def test_a_prompt_more_leaves_other_answers_alone(stage: Stage, tmp_path: Path) -> None:
    stage(PROMPTS[1:], "fewer")
    stage(PROMPTS, "all")
    assert records(tmp_path / "fewer") == [r for r in records(tmp_path / "all") if r["id"] != PROMPTS[0]["id"]]


def test_the_seed_changes_sampling(stage: Stage, tmp_path: Path) -> None:
    stage(PROMPTS[:2], "a", seed=1)
    stage(PROMPTS[:2], "b", seed=2)
    first, second = (records(tmp_path / name)[0]["turns"][0] for name in "ab")
    assert first["prompt_ids"] == second["prompt_ids"]
    assert first["token_ids"] != second["token_ids"]


class TestErrors:
    def test_an_error_is_recorded_and_ends_its_conversation_only(
        self, stage: Stage, engine: ToyEngine, tmp_path: Path
    ) -> None:
        broken = next(record for record in PROMPTS if len(record["messages"]) == 3)
        engine.failing = {f"{broken['id']}-1"}
        counts = stage(PROMPTS)
        turns = {record["id"]: record["turns"] for record in records(tmp_path / "out")}
        assert [turn["error"] for turn in turns.pop(broken["id"])] == [None, "engine_error: out of luck"]
        assert all(turn["error"] is None for rest in turns.values() for turn in rest)
        assert counts["errors"] == {"engine_error": 1}

    @pytest.mark.parametrize(
        ("text", "code"), [("the cat " * 600, "prompt_too_long"), ("say <|im_end|>", "special_token_in_text")]
    )
    def test_a_prompt_that_cannot_be_asked_is_recorded(
        self, stage: Stage, engine: ToyEngine, tmp_path: Path, text: str, code: str
    ) -> None:
        stage([prompt(text), *PROMPTS])
        assert code in {str(turn["error"]).split(":")[0] for r in records(tmp_path / "out") for turn in r["turns"]}
        assert not any(text in str(request.messages) for group in engine.groups for request in group)

    def test_special_tokens_in_what_users_wrote_are_no_reason_to_stop(self, stage: Stage) -> None:
        counts = stage([*(prompt(f"what is <|im_end|>? {number}") for number in range(30)), *PROMPTS])
        assert counts["errors"] == {"special_token_in_text": 30}
        assert counts["answers"] == sum(len(record["messages"]) for record in PROMPTS)

    def test_too_many_errors_fail_at_once_and_quote_the_first(self, stage: Stage, engine: ToyEngine) -> None:
        engine.failing = {f"{record['id']}-0" for record in PROMPTS[:10]}
        with pytest.raises(Eagle3Error, match=r"(?s)too many.*out of luck.*max_error_share.*answers are kept"):
            stage(PROMPTS)

    @pytest.mark.parametrize("batch_size", [None, 4])
    def test_after_fixing_the_cause_only_failed_prompts_are_asked(
        self, stage: Stage, engine: ToyEngine, tmp_path: Path, batch_size: int | None
    ) -> None:
        engine.batch_size = batch_size
        stage(PROMPTS, "undisturbed")
        engine.failing = {f"{record['id']}-0" for record in PROMPTS[:10]}
        with pytest.raises(Eagle3Error):
            stage(PROMPTS)
        engine.failing, engine.groups = set(), []
        stage(PROMPTS)
        assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "undisturbed")
        if batch_size is None:
            assert sum(map(len, engine.groups)) < sum(len(record["messages"]) for record in PROMPTS)

    @pytest.mark.parametrize("fault", ["invents", "omits"])
    def test_an_engine_that_mixes_up_requests_is_caught(
        self, stage: Stage, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        honest = engine.generate

        def dishonest(requests: Any, sampling: Any) -> Any:
            answers = list(honest(requests, sampling))
            return [*answers[1:], *answers[1:2]] if fault == "invents" else answers[1:]

        monkeypatch.setattr(engine, "generate", dishonest)
        with pytest.raises(Eagle3Error, match="request that was not made" if fault == "invents" else "unanswered"):
            stage(PROMPTS)


class TestKills:
    @pytest.mark.slow
    @pytest.mark.parametrize("batch_size", [0, 4])
    def test_killed_again_and_again_gives_the_same_bytes(
        self, target: Path, tmp_path: Path, stage: Stage, engine: ToyEngine, batch_size: int
    ) -> None:
        engine.batch_size = batch_size or None
        stage(PROMPTS, "undisturbed", shards=2)
        (tmp_path / "out").mkdir()
        paths = [str(target), str(tmp_path / "part.jsonl.zst"), str(tmp_path / "out")]
        for survives in (17, 25):
            command = [sys.executable, str(SCRIPT), *paths, str(batch_size), "2", str(survives)]
            done = subprocess.run(command, capture_output=True, check=False, text=True)
            assert done.returncode == -signal.SIGKILL, done.stderr
        engine.groups = []
        stage(PROMPTS, shards=2)
        asked = sum(map(len, engine.groups))
        assert 0 < asked <= sum(len(record["messages"]) for record in PROMPTS) - (32 if batch_size else 42)
        assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "undisturbed")

    def test_only_a_damaged_shard_is_rebuilt(self, stage: Stage, engine: ToyEngine, tmp_path: Path) -> None:
        engine.batch_size = 4
        stage(PROMPTS, shards=3)
        before = shard_bytes(tmp_path / "out")
        damaged = tmp_path / "out" / "shard-1.jsonl.zst"
        expected = {record["id"] for record in read_records(damaged)}
        damaged.write_bytes(damaged.read_bytes()[:-20])
        (tmp_path / "out" / ".turns.jsonl").unlink()
        engine.groups = []
        stage(PROMPTS, shards=3)
        assert shard_bytes(tmp_path / "out") == before
        assert {request.id.split("-")[0] for group in engine.groups for request in group} == expected


def embedded(target: str, prompts: str, folder: str) -> None:
    """Run the stage with the embedded engine."""
    responses.make(
        ResponsesSettings(max_tokens=24, temperature=1.0, shards=2),
        EngineSettings(batch_size=4, dtype="float32"),
        MachineSettings(device="cpu", threads=1),
        target=Path(target),
        prompts=Path(prompts),
        folder=Path(folder),
    )


@pytest.mark.slow
def test_the_embedded_engine_killed_between_groups(target: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "part.jsonl.zst", PROMPTS)
    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
    arguments = [str(target), str(tmp_path / "part.jsonl.zst"), str(tmp_path / "killed")]
    script = "import sys; from tests.stages.test_responses import embedded; embedded(*sys.argv[1:])"
    killed = subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=Path(__file__).parents[2])
    log = tmp_path / "killed" / ".turns.jsonl"
    while killed.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") >= 8):
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    for name in ("killed", "undisturbed"):
        embedded(arguments[0], arguments[1], str(tmp_path / name))
    assert shard_bytes(tmp_path / "killed") == shard_bytes(tmp_path / "undisturbed")
    chat = load_chat(load_target(target))
    for turn in (turn for record in records(tmp_path / "killed") for turn in record["turns"]):
        assert turn["prompt_ids"] == chat.render(turn["request"]["messages"])
        assert 0 < len(turn["token_ids"]) <= 24
        assert (turn["token_ids"][-1] in chat.stop_ids) == (turn["finish_reason"] == "stop")
