"""A run on the answers that its source holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.files.records import read_json, read_records
from tests.workflow.conftest import new_project

pytestmark = pytest.mark.slow


def test_provided_answers_join_the_dataset_with_generated_ones(tmp_path: Path, tiny_target: Path) -> None:
    project = new_project(tmp_path / "project", tiny_target)
    rows = [
        {"prompt": f"question {number}", "completion": f"the answer to it is {number}, and that is all"}
        for number in range(12)
    ]
    (project.path / "prompts/given.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"path": "prompts/given.jsonl", "answers": "as_is"}
    project.set(prompts={"sources": [given, {"path": "prompts/code.jsonl"}]})
    run = project.snakemake("dataset")
    assert "responses/part-0" in run.computed

    results = project.path / "results/demo"
    stats = [read_json(results / f"samples/part-{part}/stats.json")["sources"] for part in (0, 1)]
    assert sum(part["given"]["off_policy"] for part in stats) == 12
    assert not any(part.get("code", {}).get("off_policy") for part in stats)
    splits = (results / f"dataset/{name}.jsonl.zst" for name in ("train", "eval"))
    found = [record for split in splits for record in read_records(split)]
    assert sum(record.get("off_policy", False) for record in found) == 12
    assert {record["source"] for record in found if not record.get("off_policy")} == {"code"}

    project.set(prompts={"sources": [given]}, engine={"name": "openai"})
    # There is no endpoint to ask, and none is needed.
    assert "responses/part-0" in project.snakemake("dataset").computed
