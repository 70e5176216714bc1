"""An upgrade of the code that does not affect any artifact, with the real Snakemake."""

from __future__ import annotations

import re

import pytest

from eagle3.artifacts.manifest import read
from tests.workflow.conftest import Project
from tests.workflow.test_plan import rows

pytestmark = pytest.mark.slow

PARTS = {f"{stage}/part-{part}" for stage in ("responses", "hidden_states") for part in (0, 1)}


def test_accepted_artifacts_are_not_computed_again(project: Project) -> None:
    project.edit("eagle3/engines/transformers/engine.py", "the embedded engine cannot load", "cannot load")
    before = project.artifacts()
    plan = project.eagle3("plan")
    assert rows(plan)["responses"][:4] == ["2", "0", "0", "2"]
    words = " ".join(plan.text.split())
    for stage in ("responses", "hidden_states"):
        assert f"{stage}: 2 of the 2 to compute" in words
        assert f"`eagle3 accept {stage}`" in words
    assert rows(project.eagle3("plan"))["responses"][:4] == ["2", "0", "0", "2"]
    assert project.eagle3("accept", "responses", "hidden_states").code == 0
    assert rows(project.eagle3("plan"))["responses"][:4] == ["2", "0", "2", "0"]
    assert "nothing to free" in project.eagle3("gc").text
    run = project.snakemake("hidden_states")
    assert run.computed == set()
    assert run.adopted >= PARTS
    assert project.snakemake("-n", "hidden_states").idle
    assert project.artifacts() == before
    (note,) = read(project.path / "results/demo/responses/part-0").accepted
    assert "@" in note.by
    again = project.eagle3("accept", "responses")
    assert again.text.count("already current") == 2


def test_a_module_renamed_everywhere_plans_nothing(project: Project) -> None:
    package = project.path / "eagle3"
    for path in package.rglob("*.py"):
        text = re.sub(r"\beagle3\.files\.hashing\b", "eagle3.files.digests", path.read_text())
        path.write_text(re.sub(r"\beagle3\.engines\.base\b", "eagle3.engines.interface", text))
    (package / "files/hashing.py").rename(package / "files/digests.py")
    (package / "engines/base.py").rename(package / "engines/interface.py")
    assert project.snakemake("-n").idle
    assert all(row[:4] == [row[0], row[0], "0", "0"] for row in rows(project.eagle3("plan")).values())
