"""The whole workflow on the real vLLM, with a thinking target of Kimi's architecture and an MLA draft."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.chat.template import Chat, load_chat
from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.files.records import Record, read_json, read_records
from eagle3.stages import acceptance_served as served
from eagle3.target.pin import load_target
from tests.engines.conftest import REAL_VLLM
from tests.workflow.conftest import ROOT, Project

pytestmark = [*REAL_VLLM, pytest.mark.timeout(1200)]

CONFIG = "config/kimi-nano.yaml"


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A checkout in which the run of config/kimi-nano.yaml is finished."""
    path = tmp_path_factory.mktemp("nano") / "project"
    for folder in ("eagle3", "workflow", "resources/kimi-nano"):
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (path / "config").mkdir()
    shutil.copyfile(ROOT / CONFIG, path / CONFIG)
    project = Project(path)
    project.snakemake("--configfile", CONFIG)
    return project


@pytest.fixture(scope="module")
def results(nano: Project) -> Path:
    return nano.path / "results/kimi-nano"


@pytest.fixture(scope="module")
def chat(results: Path) -> Chat:
    return load_chat(load_target(results / "target/target.json"))


def all_samples(results: Path) -> list[Record]:
    return [sample for name in ("train", "eval") for sample in read_records(results / f"dataset/{name}.jsonl.zst")]


def counts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "manifest.json")["counts"]
    return found


def test_spans_hold_the_reasoning(results: Path, chat: Chat) -> None:
    """What is trained on begins after `<think>`, which belongs to the prompt, and ends with the end of the turn."""
    assert chat.reasoning_ids is not None
    opening, closing = chat.reasoning_ids
    (end,) = chat.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    samples = all_samples(results)
    assert len(samples) > 200
    finished = 0
    for sample in samples:
        ((start, stop),) = sample["spans"]
        prompt, answer = sample["input_ids"][:start], sample["input_ids"][start:stop]
        assert stop == len(sample["input_ids"])
        assert prompt[-1] == opening
        assert answer.index(closing) > 5 if closing in answer else len(answer) > 5, "reasoning of a few tokens at least"
        if sample["finish_reason"] == "stop":
            finished += 1
            assert answer[-1] == end
            assert len(answer) > answer.index(closing) + 2
    # A target as small as this one may ramble on now and then.
    assert finished > 0.95 * len(samples)


def test_a_blanked_rendering_is_never_trained_on(results: Path, chat: Chat) -> None:
    """The template shows finished answers without their reasoning: in contexts, and nowhere else."""
    assert chat.reasoning_ids is not None
    blank = list(chat.reasoning_ids)
    later = 0
    for record in read_records(results / "responses/part-0/shard-0.jsonl.zst"):
        for turn in record["turns"]:
            messages = [*turn["request"]["messages"], turn["message"]]
            finished = chat.tokenizer.apply_chat_template(messages, return_dict=False)
            assert turn["message"]["reasoning"]
            trained = turn["prompt_ids"] + turn["token_ids"]
            assert finished != trained
            # The finished rendering holds one blank more: the one that stands for this answer's reasoning.
            assert pairs(finished, blank) == pairs(trained, blank) + 1 == len(turn["request"]["messages"]) // 2 + 1
            assert pairs(turn["token_ids"], blank) == 0
            later += len(turn["request"]["messages"]) > 1
    assert later > 50


def pairs(ids: list[int], pair: list[int]) -> int:
    return sum(ids[place : place + 2] == pair for place in range(len(ids) - 1))


def test_ids_rebuilt_from_the_text_are_the_engines_own(results: Path) -> None:
    """Except for the odd answer in which the target wrote a word in other tokens than the tokenizer would."""
    counts = counts_of(results / "responses/part-0")
    rebuilt = counts["ids_rebuilt_from_the_text"]
    assert sum(rebuilt.values()) == counts["answers"]
    assert rebuilt["equal"] > 0.97 * counts["answers"]


def test_states_are_the_targets(results: Path) -> None:
    stats = read_json(results / "hidden_states/part-0/stats.json")
    assert stats["stored"] == counts_of(results / "samples/part-0")["samples"]
    # All but ties in bf16.
    assert stats["teacher_agreement"] > 0.98


def test_serving_agrees_with_the_simulation(results: Path) -> None:
    """Responses were greedy, so both walk the same texts: the same prompts give the same steps except for near ties."""
    simulated, served = (read_json(results / f"acceptance/{kind}/acceptance.json") for kind in ("simulated", "served"))
    assert served["engine"]["name"] == "vllm"
    expected = simulated["on_served_prompts"]
    assert served["acceptance_length"] == pytest.approx(expected["acceptance_length"], rel=0.03)
    assert served["per_position"] == pytest.approx(expected["per_position"], abs=0.05)
    assert expected["acceptance_length"] > 1.5
    # In bf16 the last place of such logits is 0.06 to 0.13.
    assert served["identical_outputs"] > 0.8
    assert all(abs(found["logit_gap"]) < 0.3 for found in served["divergences"])


def test_the_embedded_engine_drafts_the_same(results: Path, tmp_path: Path) -> None:
    """An MLA draft in plain PyTorch and in vLLM: the same prompts take the same steps, except for rounding."""
    settings = AcceptanceSettings.model_validate(yaml.safe_load((ROOT / CONFIG).read_text())["acceptance"])
    served.make(
        settings,
        EngineSettings(),
        MachineSettings(threads=1),
        target=results / "target/target.json",
        evaluation=results / "dataset/eval.jsonl.zst",
        export=results / "export/plain/config.json",
        folder=tmp_path,
    )
    found = read_json(tmp_path / "acceptance.json")
    expected = read_json(results / "acceptance/served/acceptance.json")
    assert found["prompts"] == expected["prompts"]
    assert found["steps"] == pytest.approx(expected["steps"], rel=0.03)
    assert found["accepted"] == pytest.approx(expected["accepted"], rel=0.05)


def test_the_draft_is_of_the_targets_kind(results: Path) -> None:
    config = read_json(results / "export/plain/config.json")
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]


def test_a_draft_of_llamas_kind_is_trained_and_exported_too(nano: Project) -> None:
    """It serves such targets on GPUs; here it is trained, exported, and drafts as in training when loaded again."""
    overlay = {"run": "gqa", "draft": {"attention": "gqa", "epochs": 1}}
    (nano.path / "gqa.yaml").write_text(yaml.safe_dump(overlay))
    run = nano.snakemake("export", "--configfile", CONFIG, "gqa.yaml")
    assert "results/gqa/responses/part-0: adopted from the store" in run.text
    counts = counts_of(nano.path / "results/gqa/export")
    assert counts["architecture"] == "LlamaForCausalLMEagle3"
    assert counts["largest_deviation_from_training"] < 1e-3
