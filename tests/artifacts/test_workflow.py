"""Recipes: what Snakemake compares to know whether an artifact must be rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from eagle3.artifacts.workflow import Workflow
from eagle3.errors import Eagle3Error


def test_a_draft_follows_what_it_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the folder's name: other weights in it make another draft, the same bytes elsewhere in time do not.

    So does the configuration that says what the weights mean: draft.json, or config.json where there is none.
    """
    monkeypatch.chdir(tmp_path)
    Path(".snakemake").mkdir()
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    flow = Workflow({"run": "r", "prompts": {"sources": [{"path": "a.jsonl"}]}, "draft": {"warm_start": str(earlier)}})
    recipes = []
    for weights in (None, b"one", b"two", b"one"):
        if weights is not None:
            (earlier / "model.safetensors").write_bytes(weights)
        recipes.append(flow.recipe("draft"))
        assert flow.recipe("vocabulary") == flow.recipe("vocabulary")
    missing, one, two, again = recipes
    assert len({missing, one, two}) == 3
    assert one == again
    (earlier / "config.json").write_bytes(b"one")
    plain = flow.recipe("draft")
    (earlier / "draft.json").write_bytes(b"one")
    ours = flow.recipe("draft")
    (earlier / "config.json").write_bytes(b"two")
    assert flow.recipe("draft") == ours
    (earlier / "draft.json").write_bytes(b"two")
    assert len({again, plain, ours, flow.recipe("draft")}) == 4


def test_prompts_follow_the_names_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's stem is the name of its source in all counts, so the settings, and with them the key, hold it."""
    monkeypatch.chdir(tmp_path)
    Path("prompts").mkdir()
    Path("prompts/chat.jsonl").write_text("{}")
    flow = Workflow({"run": "r", "prompts": {"sources": [{"path": "prompts"}]}})
    before = orjson.loads(flow.recipe("prompts"))["settings"]
    Path("prompts/chat.jsonl").rename("prompts/talk.jsonl")
    assert orjson.loads(flow.recipe("prompts"))["settings"] != before


@pytest.mark.parametrize(
    ("draft", "machine", "remedy"),
    [
        ({}, {"gpus": 8}, "set draft.accumulate to 8 or a multiple"),
        ({"accumulate": 6}, {"gpus": 4}, "set draft.accumulate to 4 or a multiple"),
        ({"float8": True}, {"device": "cpu"}, "set draft.float8 to false"),
    ],
)
def test_what_the_training_will_not_do_on_this_machine_is_said_before_the_first_stage(
    draft: dict[str, Any], machine: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"run": "r", "prompts": {"sources": [{"path": "a.jsonl"}]}, "draft": draft, "machine": machine}
    with pytest.raises(Eagle3Error, match=remedy):
        Workflow(values).check_training("results/r/draft/manifest.json")
    # A finished draft may be served on any machine.
    Path("results/r/draft").mkdir(parents=True)
    Path("results/r/draft/manifest.json").write_text("{}")
    Workflow(values).check_training("results/r/draft/manifest.json")
