from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from eagle3.config.vocabulary import VocabularySettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_json, write_json, write_records
from eagle3.stages import vocabulary
from eagle3.stages.vocabulary import choose

V = 330
IM_END = 2


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose template also writes marks of reasoning and tool calls; V is padded beyond the tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "<b>"])
    tokenizer.chat_template += "{% if tools %}<tool_call>{% endif %}{% if thinking %}<think></think>{% endif %}"
    tokenizer.save_pretrained(folder / "model")
    config = {"vocab_size": V, "eagle3_eos_token_ids": [IM_END]}
    pin = {"path": "model", "revision": "r1", "config": config, "trust_remote_code": False}
    write_json(folder / "target.json", pin)
    return folder / "target.json"


FORCED = {IM_END, 320, 321, 322}


def sample(source: str, prompt: list[int], answer: list[int]) -> Record:
    spans = [[len(prompt), len(prompt) + len(answer)]]
    return {"id": "x", "source": source, "input_ids": prompt + answer, "spans": spans}


SAMPLES = [
    sample("a", [9, 9, 9], [50, 50, 50, 60, IM_END]),
    sample("a", [9], [60, 60, 70, IM_END]),
    sample("b", [9], [80, 50, IM_END]),
]


def run(target: Path, folder: Path, records: list[Record], **values: Any) -> dict[str, Any]:
    write_records(folder / "train.jsonl.zst", records)
    chosen = VocabularySettings.model_validate(values)
    return vocabulary.make(chosen, target=target, train=folder / "train.jsonl.zst", folder=folder)


def draft_ids(folder: Path) -> list[int]:
    d2t = load_file(folder / "vocabulary.safetensors")["d2t"]
    return [int(id) for id in d2t + np.arange(len(d2t))]


def test_most_frequent_tokens_of_the_spans_and_the_forced_ones(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path, SAMPLES, size=6)
    assert draft_ids(tmp_path) == sorted({*FORCED, 50, 60})
    tensors = load_file(tmp_path / "vocabulary.safetensors")
    assert tensors["t2d"].dtype == bool
    assert tensors["d2t"].dtype == np.int64
    assert np.flatnonzero(tensors["t2d"]).tolist() == draft_ids(tmp_path)
    assert {int(id): int(tensors["counts"][id]) for id in np.flatnonzero(tensors["counts"])} == {
        IM_END: 3,
        50: 4,
        60: 3,
        70: 1,
        80: 1,
    }


def test_metadata_and_statistics_say_what_is_covered(target: Path, tmp_path: Path) -> None:
    counts = run(target, tmp_path, SAMPLES, size=6)
    stats = read_json(tmp_path / "stats.json")
    with safe_open(tmp_path / "vocabulary.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata["target_revision"] == "r1"
    assert metadata["data_sha256"] == hashlib.sha256((tmp_path / "train.jsonl.zst").read_bytes()).hexdigest()
    assert float(metadata["coverage"]) == pytest.approx(10 / 12)
    assert json.loads(metadata["coverage_per_source"]) == {"a": 8 / 9, "b": 2 / 3} == stats["sources"]
    assert counts["coverage"] == pytest.approx(10 / 12)
    assert {entry["id"] for entry in stats["forced"]} == FORCED
    assert [entry["id"] for entry in stats["outside"]] == [70, 80]
    assert {entry["text"] for entry in stats["forced"]} == {"<|im_end|>", "<think>", "</think>", "<tool_call>"}


def test_fewer_tokens_than_asked_for_are_filled_with_the_lowest_ids_and_said(target: Path, tmp_path: Path) -> None:
    counts = run(target, tmp_path, SAMPLES, size=12)
    assert draft_ids(tmp_path) == sorted({*FORCED, 50, 60, 70, 80, 0, 1, 3, 4})
    assert counts["never seen"] == 4 + 3
    assert counts["coverage"] == 1.0


def test_no_size_is_the_whole_vocabulary(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path, SAMPLES)
    tensors = load_file(tmp_path / "vocabulary.safetensors")
    assert tensors["t2d"].all()
    assert not tensors["d2t"].any()
    assert len(tensors["d2t"]) == V


def test_coverage_in_place_of_a_size(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path, SAMPLES, coverage=0.8)
    assert draft_ids(tmp_path) == sorted({*FORCED, 50, 60})
    counts = run(target, tmp_path, SAMPLES, coverage=1.0)
    assert counts["coverage"] == 1.0
    assert counts["size"] == len(FORCED) + 4
    with pytest.raises(ValidationError, match="mutually exclusive"):
        VocabularySettings(size=10, coverage=0.9)


@pytest.mark.parametrize("size", [3, V + 1])
def test_a_size_that_does_not_fit(target: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(Eagle3Error, match=rf"(?s)vocabulary\.size.*{size}.*4 .*to {V}"):
        run(target, tmp_path, SAMPLES, size=size)


@pytest.mark.parametrize("records", [[], [sample("a", [9], [])]])
def test_nothing_generated(target: Path, tmp_path: Path, records: list[Record]) -> None:
    with pytest.raises(Eagle3Error, match="no generated token"):
        run(target, tmp_path, records)


def test_ids_of_another_target(target: Path, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=rf"(?s)outside the target's vocabulary.*{V + 5}"):
        run(target, tmp_path, [sample("a", [9], [V + 5])])


@given(
    counts=st.lists(st.integers(0, 5), min_size=6, max_size=40),
    size=st.integers(3, 40),
    forced=st.sets(st.integers(0, 5), max_size=3),
)
def test_choice_against_a_plain_sort(counts: list[int], size: int, forced: set[int]) -> None:
    size = min(size, len(counts))
    ranked = sorted(range(len(counts)), key=lambda id: (id not in forced, -counts[id], id))
    chosen = choose(np.array(counts), np.array(sorted(forced), dtype=np.int64), VocabularySettings(size=size))
    assert chosen.tolist() == sorted(ranked[:size])


def test_the_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np; from pathlib import Path; from eagle3.files.tensors import write_tensors;"
        "write_tensors(Path(sys.argv[1]), {'b': np.ones(3, bool), 'a': np.arange(4)}, {c: c for c in 'zyxwvuts'})"
    )
    for name in "12345":
        subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], check=True)
    assert len({(tmp_path / name).read_bytes() for name in "12345"}) == 1
    tensors = load_file(tmp_path / "1")
    assert tensors["b"].tolist() == [True] * 3
    assert tensors["a"].tolist() == [0, 1, 2, 3]
