"""Served acceptance: real prompts of held-out samples, with and without a draft, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.acceptance.figures import choose
from eagle3.chat.template import load_chat
from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture, GenerationRequest, Sampling, Served, open_engine
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_json, write_records
from eagle3.stages import acceptance_served as served
from eagle3.target.pin import Target
from eagle3.target.weights import head_weights
from tests.drafts import exported, new_draft, perfect_draft, pinned
from tests.engines import targets


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_scripted(tmp_path_factory.mktemp("scripted"))


def samples(target: Target) -> list[Record]:
    """Held-out samples of two sources: prompts as rendered, and generated ids that serving must not look at."""
    chat = load_chat(target)
    records = []
    for number in range(6):
        thinking = number % 2 == 0
        prompt = chat.render([{"role": "user", "content": f"{number}"}], template_kwargs={"thinking": thinking})
        records.append(
            {
                "id": f"{number:016x}-0",
                "source": "reasoning" if thinking else "chat",
                "input_ids": [*prompt, 5, 6, 7],
                "spans": [[len(prompt), len(prompt) + 3]],
            }
        )
    return records


def make(target: Target, plain: Path, folder: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the stage; return its counts and acceptance.json."""
    output = folder / "served"
    output.mkdir()
    write_records(folder / "eval.jsonl.zst", samples(target))
    counts = served.make(
        AcceptanceSettings(**settings),
        EngineSettings(batch_size=4),
        MachineSettings(threads=1, device="cpu"),
        target=pinned(target, folder / "served-pin"),
        evaluation=folder / "eval.jsonl.zst",
        export=plain / "config.json",
        folder=output,
    )
    return counts, read_json(output / "acceptance.json")


def test_a_perfect_draft_gains_k_tokens_a_step(scripted: Target, tmp_path: Path) -> None:
    """The script's tokens are known: figures can be computed by hand, for each source."""
    plain = exported(perfect_draft(scripted), scripted, tmp_path)
    counts, found = make(scripted, plain, tmp_path, drafts=3, prompts=6, max_tokens=200)
    assert (found["kind"], found["drafts"], found["prompts"]) == ("served", 3, 6)
    assert found["engine"]["name"] == "transformers"
    assert found["identical_outputs"] == 1.0
    assert found["divergences"] == []
    assert set(found["per_source"]) == {"chat", "reasoning"}
    tokenizer = load_chat(scripted).tokenizer
    content = tokenizer.encode(f"{targets.CONTENT}<|im_end|>", add_special_tokens=False)
    reasoning = tokenizer.encode(f"{targets.REASONING}</think>", add_special_tokens=False)
    for source, length in (("chat", len(content)), ("reasoning", len(reasoning) + len(content))):
        full, rest = divmod(length - 1, 4)
        figures = found["per_source"][source]
        assert figures["steps"] == 3 * (full + (rest > 0))
        assert figures["acceptance_length"] == pytest.approx(1 + (3 * full + rest) / (full + (rest > 0)))
    assert found["acceptance_length"] == counts["acceptance_length"] > 3
    assert all(speed > 0 for speed in found["tokens_per_second"].values())


def test_a_bad_draft_changes_nothing_but_speed(scripted: Target, tmp_path: Path) -> None:
    plain = exported(new_draft(scripted, 50, (0, 1, 2), intermediate_size=32), scripted, tmp_path)
    _, found = make(scripted, plain, tmp_path, drafts=2, prompts=4, max_tokens=9)
    assert found["identical_outputs"] == 1.0
    assert found["tokens"] <= 4 * 9
    assert 1 <= found["acceptance_length"] < 1.5
    assert len(found["per_position"]) == 2


def test_sampled_serving_is_measured_next_to_greedy_serving(scripted: Target, tmp_path: Path) -> None:
    """At a temperature so low that sampling is greedy: figures must be equal, and a perfect draft is still accepted."""
    plain = exported(perfect_draft(scripted), scripted, tmp_path)
    counts, found = make(scripted, plain, tmp_path, drafts=3, prompts=4, max_tokens=40, temperature=1e-4)
    sampled = found["sampled"]
    assert sampled["temperature"] == 1e-4
    for name in ("acceptance_length", "per_position", "steps", "tokens", "per_source"):
        assert sampled[name] == found[name]
    assert counts["sampled_acceptance_length"] == found["acceptance_length"]
    assert sampled["milliseconds_per_token"]["with_draft"] > 0


def test_without_a_temperature_nothing_is_sampled(scripted: Target, tmp_path: Path) -> None:
    plain = exported(perfect_draft(scripted), scripted, tmp_path)
    assert make(scripted, plain, tmp_path, drafts=1, prompts=2, max_tokens=4)[1]["sampled"] is None


def test_no_held_out_samples_is_an_error(scripted: Target, tmp_path: Path) -> None:
    write_records(tmp_path / "eval.jsonl.zst", [])
    with pytest.raises(Eagle3Error, match="no held-out samples"):
        served.make(
            AcceptanceSettings(),
            EngineSettings(),
            MachineSettings(),
            target=pinned(scripted, tmp_path / "pin"),
            evaluation=tmp_path / "eval.jsonl.zst",
            export=tmp_path / "config.json",
            folder=tmp_path,
        )


def test_answers_of_one_token_ask_no_draft(scripted: Target, tmp_path: Path) -> None:
    """The first token is the prefill's: nothing was measured, and nothing is claimed."""
    plain = exported(perfect_draft(scripted), scripted, tmp_path)
    with pytest.raises(Eagle3Error, match="never used the draft model"):
        make(scripted, plain, tmp_path, max_tokens=1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 999)), unique_by=lambda pair: pair[1], max_size=30),
    st.integers(1, 12),
    st.randoms(),
)
def test_prompts_are_spread_over_the_sources(pairs: list[tuple[str, int]], count: int, random: Any) -> None:
    """As evenly as the sources allow, whatever the order of the samples."""
    records = [{"id": str(number), "source": source} for source, number in pairs]
    chosen = choose(records, count)
    random.shuffle(records)
    assert choose(records, count) == chosen
    assert len(chosen) == min(count, len(records))
    taken = {source: sum(sample["source"] == source for sample in chosen) for source, _ in pairs}
    for source, number in taken.items():
        exhausted = number == sum(other == source for other, _ in pairs)
        assert exhausted or number >= max(taken.values()) - 1


def test_a_divergence_is_told_with_the_gap_of_its_logits(scripted: Target) -> None:
    """Answers that differ at the third token: both tokens, and the target's logits for them after the shared part."""
    prompt = samples(scripted)[1]["input_ids"][:-3]
    request = GenerationRequest(id="x", messages=[], seed=0, prompt_ids=prompt)
    with open_engine(EngineSettings(dtype="float32"), MachineSettings(threads=1, device="cpu"), scripted) as engine:
        other = engine.serve([request], Sampling(8), None, 3)
        ids = other.token_ids["x"]
        wrong = Served(
            token_ids={"x": [*ids[:2], 9, 9]}, steps={"x": 1}, accepted={"x": [0, 0, 0]}, seconds=1, durations={}
        )
        (found,) = served._divergences(engine, [request], other, wrong)
        (capture,) = engine.capture([[*prompt, *ids[:2]]], [scripted.num_layers])
    assert isinstance(capture, Capture)
    assert capture.next_token == ids[2]
    head = head_weights(scripted)
    state = capture.states[-1, 0]
    logits = head.lm_head.float() @ (state * torch.rsqrt(state.square().mean() + head.rms_norm_eps) * head.norm)
    assert (found["position"], found["tokens"]) == (2, [ids[2], 9])
    assert found["logit_gap"] == pytest.approx(float(logits[ids[2]] - logits[9]), rel=1e-4)
    assert found["logit_gap"] > 0
