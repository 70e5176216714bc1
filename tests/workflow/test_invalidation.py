"""What a user may trust: an edit rebuilds what it can change, and nothing else."""

from __future__ import annotations

import os
import shutil

import pytest

from eagle3.artifacts.manifest import read
from tests.workflow.conftest import Project, write_prompts

pytestmark = pytest.mark.slow

AFTER_DATASET = {"vocabulary", "draft", "export", "acceptance/simulated", "acceptance/served", "report"}
PARTS = {f"{stage}/part-{part}" for stage in ("responses", "samples", "hidden_states") for part in (0, 1)}


def test_a_finished_run_has_nothing_to_do(finished: Project) -> None:
    assert finished.snakemake("-n").idle


def test_touching_and_formatting_and_comments_rerun_nothing(project: Project) -> None:
    for path in (project.path / "eagle3").rglob("*.py"):
        path.write_text(f"# a comment\n{path.read_text()}\n'''A bare string.'''\n")
    for folder in ("eagle3", "workflow", "prompts", "config"):
        for path in (project.path / folder).rglob("*"):
            os.utime(path)
    assert project.snakemake("-n").idle


def test_a_fresh_checkout_with_the_results_reruns_nothing(project: Project, finished: Project) -> None:
    shutil.rmtree(project.path / "eagle3")
    shutil.copytree(finished.path / "eagle3", project.path / "eagle3")
    assert project.snakemake("-n").idle


def test_an_edit_that_changes_no_bytes_stops_at_its_stage(project: Project) -> None:
    path = project.path / "eagle3/stages/dataset.py"
    path.write_text(path.read_text() + "\nassert make\n")
    run = project.snakemake()
    assert run.computed == {"dataset"}
    assert run.adopted <= AFTER_DATASET
    assert project.snakemake("-n").idle


def test_a_setting_remakes_its_stage_and_what_follows_and_going_back_computes_nothing(project: Project) -> None:
    before = project.artifacts()
    project.set(dataset={"eval_fraction": 0.4})
    run = project.snakemake()
    assert run.computed == {"dataset"} | AFTER_DATASET
    assert project.artifacts() != before
    project.set(dataset={"eval_fraction": 0.25})
    run = project.snakemake()
    assert run.computed == set()
    assert project.artifacts() == before
    assert project.snakemake("-n").idle


def test_a_training_setting_touches_no_data(project: Project) -> None:
    project.set(draft={"decay": 0.9})
    run = project.snakemake()
    assert run.computed == AFTER_DATASET - {"vocabulary"}


def test_a_machine_setting_reruns_nothing(project: Project) -> None:
    project.set(machine={"threads": 2})
    assert project.snakemake("-n").idle


def test_the_seed_decides_all_that_is_random(project: Project) -> None:
    project.set(seed=4)
    run = project.snakemake("draft")
    assert PARTS | {"dataset", "draft"} <= run.computed
    assert "target" not in run.computed


def test_one_more_prompt_changes_its_part_only(project: Project) -> None:
    """A prompt's part follows from its content, so the other part's bytes stay."""
    with (project.path / "prompts/chat.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "one more question about the moon"}]}\n')
    run = project.snakemake("hidden_states")
    assert "prompts" in run.computed
    assert len(run.computed & {"responses/part-0", "responses/part-1"}) == 1
    assert len(run.computed & {"hidden_states/part-0", "hidden_states/part-1"}) == 1
    lines = (project.path / "prompts/chat.jsonl").read_text().splitlines()[:-1]
    (project.path / "prompts/chat.jsonl").write_text("\n".join(lines) + "\n")
    assert project.snakemake().computed == set()


def test_stopping_between_two_stages_is_not_forgotten(project: Project) -> None:
    """No mtimes are compared, so this must be known from the manifests."""
    write_prompts(project.path / "prompts/code.jsonl", "explain", 10)
    project.snakemake("prompts")
    assert not project.snakemake("-n", "hidden_states").idle
    run = project.snakemake("hidden_states")
    assert PARTS <= run.computed | run.adopted
    assert project.snakemake("-n", "hidden_states").idle


def test_a_failed_rebuild_keeps_the_earlier_generation(project: Project) -> None:
    before = project.artifacts()
    good = project.path / "prompts/code.jsonl"
    lines = good.read_text()
    good.write_bytes(b'{"messages": "\xff\xfe"}\n')
    run = project.snakemake(ok=False)
    assert run.code == 1
    assert "prompts/code.jsonl" in run.text
    good.write_text(lines)
    run = project.snakemake()
    assert run.computed == set()
    assert project.artifacts() == before


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("target/target.json", "samples_part"),
        ("samples/part-0/samples.jsonl.zst", "dataset"),
        ("dataset/train.jsonl.zst", "vocabulary"),
        ("vocabulary/vocabulary.safetensors", "draft"),
        ("hidden_states/part-1/shard-0.safetensors", "draft"),
        ("export/plain/model.safetensors", "acceptance_served"),
    ],
)
def test_a_damaged_artifact_is_noticed_and_only_it_is_rebuilt(project: Project, name: str, reader: str) -> None:
    path = project.path / "results/demo" / name
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    run = project.snakemake("--forcerun", reader, ok=False)
    assert run.code == 1
    assert name in run.text
    path.unlink()
    run = project.snakemake()
    folders = {"/".join(name.split("/")[:depth]) for depth in (1, 2)}
    assert len(run.computed) == 1
    assert run.computed < folders
    assert path.read_bytes() == content


def test_every_declared_file_is_in_a_manifest(finished: Project) -> None:
    run = finished.path / "results/demo"
    listed = {
        (path.parent / name).relative_to(run).as_posix()
        for path in run.rglob("manifest.json")
        for name in read(path.parent).files
    }
    assert set(finished.artifacts()) == listed
