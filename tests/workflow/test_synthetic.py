"""A run whose prompts the target writes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.files.records import read_json, read_records
from tests.workflow.conftest import Project, new_project
from tests.writers import teach

pytestmark = pytest.mark.slow

SYNTHETIC = {"sources": [{"path": "prompts/chat.jsonl"}, {"synthetic": True, "name": "own", "limit": 12}], "parts": 2}


def test_the_stage_is_planned_only_with_a_source_self(finished: Project, project: Project) -> None:
    assert "synthetic" not in finished.snakemake("-n", "--forceall").text
    project.set(prompts=SYNTHETIC, synthetic={"count": 40})
    run = project.snakemake("-n")
    assert "rule synthetic:" in run.text
    plan = project.eagle3("plan").text
    assert "synthetic" in plan
    assert "10,240" in plan
    project.set(engine={"name": "openai"})
    run = project.snakemake("-n", ok=False)
    assert "set `engine.name` to vllm or transformers" in run.text


def test_its_turns_go_through_the_whole_run(tmp_path: Path, tiny_target: Path) -> None:
    project = new_project(tmp_path / "project", teach(tiny_target, tmp_path / "writer"))
    project.set(prompts=SYNTHETIC, synthetic={"count": 40, "max_tokens": 40})
    run = project.snakemake()
    assert "synthetic" in run.computed
    results = project.path / "results/demo"
    stats = read_json(results / "prompts/stats.json")["sources"]["own"]
    assert stats["prompts"] == 12
    assert stats["rows"] == read_json(results / "synthetic/stats.json")["prompts"]
    train = list(read_records(results / "dataset/train.jsonl.zst"))
    assert {"own", "chat"} <= {sample["source"] for sample in train}
    assert project.snakemake("-n").idle

    # Other settings of the prompts do not affect the costly turns; settings of the sampling regenerate them.
    project.set(prompts=SYNTHETIC | {"max_chars": 10_000})
    assert "synthetic" not in project.snakemake("prompts").computed
    project.set(synthetic={"temperature": 0.9})
    assert project.snakemake("prompts").computed == {"synthetic", "prompts"}
