"""Previews: the plan, the DAG in its forms, and what gc would free."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workflow.conftest import ROOT, Project, Run, new_project

pytestmark = pytest.mark.slow


def rows(run: Run) -> dict[str, list[str]]:
    """Return the plan's table: stage -> jobs, up to date, adopted, to compute, tokens, disk."""
    assert run.code == 0, run.text
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in run.text.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


def test_a_new_project_has_everything_to_compute(tmp_path: Path, tiny_target: Path) -> None:
    project = new_project(tmp_path / "project", tiny_target)
    plan = rows(project.eagle3("plan"))
    assert plan["hidden_states"][:4] == ["2", "0", "0", "2"]
    assert all(row[3] == row[0] for row in plan.values())
    assert not (project.path / "results").exists()


def test_a_finished_project_is_up_to_date(finished: Project) -> None:
    plan = rows(finished.eagle3("plan"))
    assert len(plan) == 12
    assert all(row[:4] == [row[0], row[0], "0", "0"] for row in plan.values())


def test_the_plan_says_what_the_run_then_does(project: Project) -> None:
    before = project.path / "config/before.yaml"
    before.write_text((project.path / "config/config.yaml").read_text())
    project.set(dataset={"eval_fraction": 0.4})
    plan = rows(project.eagle3("plan"))
    assert plan["samples"][:4] == ["2", "2", "0", "0"]
    assert plan["hidden_states"][:4] == ["2", "2", "0", "0"]
    assert plan["dataset"][:4] == ["1", "0", "0", "1"]
    assert plan["draft"][:4] == ["1", "0", "0", "1"]
    assert int(plan["draft"][4].replace(",", "")) > 100
    assert "dataset" in project.snakemake("draft").computed
    back = rows(project.eagle3("plan", "--configfile", "config/before.yaml"))
    assert back["dataset"][:4] == ["1", "0", "1", "0"]
    assert back["draft"][:4] == ["1", "0", "1", "0"]


def test_gc_frees_the_earlier_generation_only_when_told(project: Project) -> None:
    project.set(vocabulary={"size": 100})
    project.snakemake("vocabulary")
    listed = project.eagle3("gc")
    assert "results/.store/vocabulary/" in listed.text
    assert "would be freed" in listed.text
    entries = list((project.path / "results/.store/vocabulary").iterdir())
    assert len(entries) == 2
    assert "freed" in project.eagle3("gc", "--yes").text
    assert len(list((project.path / "results/.store/vocabulary").iterdir())) == 1
    assert project.snakemake("-n", "vocabulary").idle


@pytest.mark.parametrize("arguments", [("--rulegraph", "mermaid-js"), ("--dag",), ("--summary",), ("--list-rules",)])
def test_snakemake_shows_the_workflow(finished: Project, arguments: tuple[str, ...]) -> None:
    run = finished.snakemake(*arguments)
    assert all(stage in run.text for stage in ("prompts", "responses_part", "hidden_states_part", "acceptance_served"))


def test_the_report_holds_every_figure(finished: Project, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    finished.snakemake("--report", str(target))
    text = target.read_text()
    for figure in (
        "training.svg",
        "acceptance_positions.svg",
        "coverage.svg",
        "rejects.svg",
        "summary.html",
        "samples.html",
    ):
        assert figure in text


def test_the_readme_draws_the_real_graph(finished: Project) -> None:
    graph = finished.snakemake("--rulegraph", "mermaid-js").text
    names = {key: name.removesuffix("_part") for key, name in re.findall(r"(id\d+)\[(\w+)\]", graph)}
    edges = {(names[a], names[b]) for a, b in re.findall(r"(id\d+) --> (id\d+)", graph)}
    drawn = set(re.findall(r"^    (\w+) --> (\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert drawn == {(a, b) for a, b in edges if a != "target" and b not in ("all", "report")}


def test_people_can_name_a_stage(finished: Project) -> None:
    assert finished.snakemake("-n", "responses", "samples", "hidden_states", "draft", "acceptance").idle


def test_a_thousand_shards_are_planned(tmp_path: Path, tiny_target: Path) -> None:
    project = new_project(tmp_path / "project", tiny_target)
    project.set(prompts={"parts": 10}, hidden_states={"shards": 100})
    run = project.snakemake("-n")
    assert re.search(r"hidden_states_part\s+10\b", run.text)
