"""The configuration: typos are errors that say what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.artifacts.registry import STAGES, stage_settings
from eagle3.config.configuration import load, resolve
from eagle3.errors import Eagle3Error

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"run": "r", "prompts": {"sources": [{"path": "a.jsonl"}]}}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "config").glob("*.yaml")))
def test_the_shipped_configurations_are_valid(name: str) -> None:
    load([ROOT / "config" / name])


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [
        ({"sed": 1}, "sed", "seed"),
        ({"draft": {"epoch": 1}}, "draft.epoch", "epochs"),
        ({"prompts": {"sources": [{"paht": "a"}]}}, "prompts.sources.0.paht", "path"),
        ({"responses": {"temprature": 1}}, "responses.temprature", "temperature"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(change: dict[str, Any], key: str, nearest: str) -> None:
    with pytest.raises(Eagle3Error) as caught:
        resolve(MINIMAL | change)
    assert f"`{key}`" in str(caught.value)
    assert f"did you mean `{nearest}`" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"draft": {"epochs": 0}}, "draft.epochs"),
        ({"draft": {"decay": "much"}}, "draft.decay"),
        ({"hidden_states": {"aux_layer_ids": []}}, "hidden_states.aux_layer_ids"),
        ({"hidden_states": {"aux_layer_ids": [2, 4, 6, 8]}}, "hidden_states.aux_layer_ids"),
        ({"engine": {"name": "llama.cpp"}}, "engine.name"),
        ({"run": "../elsewhere"}, "run"),
        ({"prompts": []}, "prompts"),
        ({"dataset": {"eval_fraction": 1.0}}, "dataset.eval_fraction"),
    ],
)
def test_a_bad_value_is_named_with_what_was_found(change: dict[str, Any], key: str) -> None:
    with pytest.raises(Eagle3Error) as caught:
        resolve(MINIMAL | change)
    assert f"`{key}`" in str(caught.value)
    assert "found:" in str(caught.value)


def test_the_seed_reaches_every_random_stage_unless_it_has_its_own() -> None:
    config = resolve(MINIMAL | {"seed": 5, "draft": {"seed": 9}})
    assert (config.prompts.seed, config.responses.seed, config.dataset.seed, config.draft.seed) == (5, 5, 5, 9)


def test_later_files_override_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(MINIMAL | {"draft": {"epochs": 2, "decay": 0.5}}))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"draft": {"epochs": 3}}))
    config = load([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert (config.draft.epochs, config.draft.decay) == (3, 0.5)


@pytest.mark.parametrize("content", [b"run: [", b"- a\n", b"\xff\xfe", b""])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(Eagle3Error, match=r"bad\.yaml"):
        load([path])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"none\.yaml"):
        load([tmp_path / "none.yaml"])


def test_no_stage_sees_the_machine() -> None:
    values = resolve(MINIMAL).model_dump(mode="json")
    for name in STAGES:
        assert "machine" not in stage_settings(name, values)
