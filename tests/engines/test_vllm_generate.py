"""Responses from the real vLLM: exact ids, reasoning, tool calls; and the same through a plain endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Generation, GenerationRequest, Sampling, open_engine
from eagle3.engines.tuning import tune_concurrency
from eagle3.engines.vllm.engine import VllmEngine
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target
from tests.engines import targets
from tests.engines.conftest import REAL_VLLM

pytestmark = REAL_VLLM

PARSERS = ("--reasoning-parser", "kimi_k2", "--tool-call-parser", "kimi_k2", "--enable-auto-tool-choice")
MACHINE = MachineSettings(threads=1, concurrency=8, engine_arguments=("--kv-cache-memory-bytes", "200M"))
GREEDY = Sampling(max_tokens=80)


@pytest.fixture(scope="module")
def engine(scripted: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    settings = EngineSettings(name="vllm", dtype="float32", arguments=PARSERS)
    folder = tmp_path_factory.mktemp("work")
    with open_engine(settings, MACHINE, scripted, folder) as opened:
        assert isinstance(opened, VllmEngine)
        yield opened


@pytest.fixture(scope="module")
def endpoint(engine: VllmEngine) -> Iterator[MachineSettings]:
    """The managed server as one that runs elsewhere."""
    list(engine.generate([ask("warm")], GREEDY))
    assert engine._server is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", engine._server.key)
        yield MACHINE.model_copy(update={"base_url": engine._server.url})


def ask(id: str, tools: list[dict[str, Any]] | None = None, **template_kwargs: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": f"How many baskets? {id}"}]
    return GenerationRequest(id=id, messages=messages, seed=7, tools=tools, template_kwargs=template_kwargs)


# What the scripted target writes, and the message that it is.
CASES: dict[str, tuple[GenerationRequest, str, str, dict[str, Any]]] = {
    "thinking": (
        ask("thinking"),
        f"{targets.REASONING}</think>{targets.CONTENT}<|im_end|>",
        "stop",
        {"reasoning": targets.REASONING, "content": targets.CONTENT},
    ),
    "instant": (ask("instant", thinking=False), f"{targets.CONTENT}<|im_end|>", "stop", {"content": targets.CONTENT}),
    "call": (ask("call", targets.TOOLS, call=True), f"{targets.CALL}<|im_end|>", "tool_calls", {"content": ""}),
    "plan": (
        ask("plan", targets.TOOLS, plan=True),
        f"{targets.PLAN}{targets.CALL}<|im_end|>",
        "tool_calls",
        {"content": "", "reasoning": targets.PLAN},
    ),
}


def check(answer: Generation, target: Target) -> None:
    tokenizer = targets.make_tokenizer()
    _, text, finish_reason, message = CASES[answer.id]
    assert answer.error is None
    assert tokenizer.decode(answer.token_ids) == text
    assert answer.finish_reason == finish_reason
    calls = answer.message.pop("tool_calls", None)
    assert answer.message == {"role": "assistant", **message}
    if finish_reason == "tool_calls":
        assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"city": "Paris"}'}]
    assert answer.raw["usage"]["completion_tokens"] == len(answer.token_ids)


def test_ids_messages_and_rebuilt_ids_agree(engine: VllmEngine, scripted: Target) -> None:
    answers = list(engine.generate([case[0] for case in CASES.values()], GREEDY))
    assert {answer.id for answer in answers} == set(CASES)
    for answer in answers:
        check(answer, scripted)
        assert answer.raw["rebuilt"] == "equal", answer.id


def test_an_answer_cut_off_in_its_reasoning(engine: VllmEngine) -> None:
    (answer,) = engine.generate([ask("thinking")], Sampling(max_tokens=4))
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4
    assert answer.message["content"] == ""
    assert targets.REASONING.startswith(answer.message["reasoning"])
    assert answer.raw["rebuilt"] == "equal"


def test_a_later_turn_is_given_its_history(engine: VllmEngine) -> None:
    """The template blanks old reasoning, so it is not in the prompt; the old answer is."""
    (first,) = engine.generate([ask("thinking")], GREEDY)
    messages = [*CASES["thinking"][0].messages, first.message, {"role": "user", "content": "And now?"}]
    (second,) = engine.generate([GenerationRequest(id="second", messages=messages, seed=1)], GREEDY)
    prompt = targets.make_tokenizer().decode(second.prompt_ids)
    assert f"<think></think>{targets.CONTENT}<|im_end|>" in prompt
    assert second.raw["rebuilt"] == "equal"


def test_raw_answers_are_the_same_every_time(engine: VllmEngine) -> None:
    runs = [{answer.id: answer for answer in engine.generate([ask("a"), ask("b")], GREEDY)} for _ in range(2)]
    for answers in runs:
        assert all(answer.raw.pop("seconds") > 0 for answer in answers.values())
    assert runs[0] == runs[1]


def test_a_refused_request_is_recorded_and_the_others_are_answered(engine: VllmEngine) -> None:
    long = GenerationRequest(id="long", messages=[{"role": "user", "content": "x" * 4000}], seed=0)
    answers = {answer.id: answer for answer in engine.generate([long, ask("thinking")], GREEDY)}
    assert answers["long"].error is not None
    assert answers["long"].error.startswith("refused: ")
    assert "maximum context length" in answers["long"].error
    assert answers["thinking"].error is None


def test_a_prompt_given_as_ids_has_the_same_answer(engine: VllmEngine) -> None:
    request = CASES["thinking"][0]
    [asked] = engine.generate([request], GREEDY)
    [again] = engine.generate([replace(request, messages=[], prompt_ids=asked.prompt_ids)], GREEDY)
    assert (again.prompt_ids, again.token_ids) == (asked.prompt_ids, asked.token_ids)


def test_version_and_arguments_are_known(engine: VllmEngine) -> None:
    assert engine.versions["vllm"]
    assert "--reasoning-parser kimi_k2" in engine.versions["vllm_arguments"]


def test_a_server_that_runs_elsewhere(endpoint: MachineSettings, scripted: Target, tmp_path: Path) -> None:
    settings = EngineSettings(name="vllm")
    with open_engine(settings, endpoint, scripted, tmp_path) as opened:
        for answer in opened.generate([case[0] for case in CASES.values()], GREEDY):
            check(answer, scripted)
        assert "vllm_model" in opened.versions
        with pytest.raises(Eagle3Error, match="captures no hidden states"):
            list(opened.capture([[1, 2, 3]], [0, 1, 2]))
        with pytest.raises(Eagle3Error, match="must start its own"):
            opened.serve([ask("a")], GREEDY, None, 3)


def test_an_endpoint_without_ids_gives_the_same_ones(endpoint: MachineSettings, scripted: Target) -> None:
    with open_engine(EngineSettings(name="openai"), endpoint, scripted) as opened:
        answers = list(opened.generate([case[0] for case in CASES.values()], GREEDY))
        assert {answer.id for answer in answers} == set(CASES)
        for answer in answers:
            check(answer, scripted)
        with pytest.raises(Eagle3Error, match="no token ids"):
            opened.generate([replace(ask("a"), prompt_ids=[1, 2])], GREEDY)


def test_the_concurrency_is_tuned(endpoint: MachineSettings, scripted: Target) -> None:
    rows, recommended = tune_concurrency(
        EngineSettings(name="vllm"), endpoint, scripted, [ask("a"), ask("b")], GREEDY, levels=(1, 2, 4)
    )
    assert [row["concurrency"] for row in rows] == [1, 2, 4]
    assert [row["requests"] for row in rows] == [3, 6, 12]
    length = len(targets.make_tokenizer().encode(CASES["thinking"][1]))
    assert all(row["tokens"] == length * row["requests"] for row in rows)
    assert recommended in (1, 2, 4)


def test_a_wrong_key_ends_the_run(endpoint: MachineSettings, scripted: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(Eagle3Error, match="set OPENAI_API_KEY"):
        open_engine(EngineSettings(name="openai"), endpoint, scripted)
