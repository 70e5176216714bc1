"""The workflow as a module of another one, with a prefix and a configuration of its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.workflow.conftest import ROOT, Project, new_project

pytestmark = pytest.mark.slow

SNAKEFILE = f"""
configfile: "settings.yaml"

rule all:
    input:
        "summary.txt",

module eagle3:
    snakefile:
        "{ROOT}/workflow/Snakefile"
    config:
        config["draft"]
    prefix:
        "speculation"

use rule * from eagle3 as draft_*

rule summary:
    input:
        rules.draft_prompts.output.stats,
    output:
        "summary.txt",
    shell:
        "cp {{input}} {{output}}"
"""


class Importer(Project):
    """A project that has the package installed, not copied."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def importing(tmp_path: Path, tiny_target: Path) -> Importer:
    """A project without our code or demo: its Snakefile imports the workflow, its settings hold ours in a section."""
    project = new_project(tmp_path / "project", tiny_target)
    values = yaml.safe_load((project.path / "config/config.yaml").read_text())
    for folder in ("workflow", "config", "eagle3"):
        shutil.rmtree(project.path / folder)
    (project.path / "settings.yaml").write_text(yaml.safe_dump({"title": "ours", "draft": values}))
    (project.path / "Snakefile").write_text(SNAKEFILE)
    return Importer(project.path)


def test_every_rule_is_imported_under_its_new_name_and_prefix(importing: Importer) -> None:
    run = importing.snakemake("-n", "draft_all")
    jobs = dict(re.findall(r"^(draft_\w+) +(\d+)$", run.text, re.MULTILINE))
    assert jobs["draft_hidden_states_part"] == "2"
    assert {"draft_target", "draft_prompts", "draft_draft", "draft_acceptance_served", "draft_report"} <= set(jobs)
    paths = set(re.findall(r"\S*results/demo/\S*", run.text))
    assert paths
    assert all(path.startswith(("speculation/results/demo/", "'speculation/")) for path in paths), paths
    # Our own first rule stays the default.
    assert set(re.findall(r"^(?:rule|localrule) (\w+):", importing.snakemake("-n").text, re.MULTILINE)) == {
        "all",
        "summary",
        "draft_prompts",
    }


def test_it_runs_with_a_prefix_and_its_own_configuration(importing: Importer) -> None:
    importing.snakemake("all", "draft_samples")
    run = importing.path / "speculation/results/demo"
    assert (importing.path / "summary.txt").read_bytes() == (run / "prompts/stats.json").read_bytes()
    assert len(list(run.glob("samples/part-*/samples.jsonl.zst"))) == 2
    # The store is next to the runs, not in the working directory.
    assert (importing.path / "speculation/results/.store/samples").is_dir()
    assert not (importing.path / "results").exists()
    assert importing.snakemake("all", "draft_samples").idle
