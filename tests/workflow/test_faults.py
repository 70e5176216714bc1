"""What goes wrong ends in one clear message, and no earlier result is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflow.conftest import Project, new_project

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path, tiny_target: Path) -> Iterator[Project]:
    """A project whose results are on a file system of 600 kB."""
    project = new_project(tmp_path / "project", tiny_target)
    results = project.path / "results"
    results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(results)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield project
    subprocess.run(["umount", "-l", str(results)], check=True)


def test_a_full_disk_stops_the_run_and_more_room_continues_it(small_disk: Project) -> None:
    run = small_disk.snakemake("draft", ok=False)
    assert run.code == 1
    assert "the disk is full" in run.text
    assert "eagle3 gc" in run.text
    made = {path.parent.parent.name for path in (small_disk.path / "results/.store").glob("*/*/manifest.json")}
    assert {"target", "prompts", "responses", "samples"} <= made
    results = small_disk.path / "results"
    subprocess.run(["mount", "-o", "remount,size=64m", str(results)], check=True)
    run = small_disk.snakemake("draft")
    assert not {name.split("/")[0] for name in run.computed} & {"target", "prompts", "responses", "samples"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": {"sources": [{"path": "prompts/none*.jsonl"}]}}, ("matches no file", "prompts/none*.jsonl")),
        ({"vocabulary": {"size": 100_000}}, ("vocabulary", "320")),
        ({"draft": {"epoch": 2}}, ("unknown key", "epochs")),
        ({"target": {"model": "no/such-folder"}}, ("no/such-folder",)),
        ({"responses": {"max_tokens": 600}}, ("512",)),
    ],
)
def test_a_wrong_setting_is_explained(project: Project, change: dict[str, object], words: tuple[str, ...]) -> None:
    before = project.artifacts()
    project.set(**change)
    run = project.snakemake(ok=False)
    assert run.code == 1
    assert all(word in run.text for word in words), run.text[-3000:]
    assert "Traceback" not in run.text.split("Building DAG")[-1]
    kept = project.path / "results/.store"
    assert {path.read_bytes() for path in kept.rglob("*") if path.is_file()} >= set(before.values())


def test_exit_codes_of_the_command_line(finished: Project) -> None:
    assert finished.eagle3("gc").code == 0
    assert finished.eagle3("verify", "nowhere").code == 1
    assert finished.eagle3("no-such-command").code == 2
    shards = "results/demo/hidden_states"
    assert finished.eagle3("verify", shards, "--target", "results/demo/target/target.json").code == 0
    shown = finished.eagle3("show", "results/demo/samples/part-0/samples.jsonl.zst")
    assert shown.code == 0
    assert "assistant" in shown.text
