"""Any process can be killed at any time: the next run resumes, and the result is the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from tests.workflow.conftest import Project

pytestmark = pytest.mark.slow

# Stage -> a scratch file that shows it has begun and not ended.
SIGNS = {"responses": ".turns*", "hidden_states": ".*", "draft": ".*"}


def wait_for_work(project: Project, stage: str, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait until the stage has written scratch; return the processes that run its command."""
    work = project.path / "results/.work" / stage
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        for path in work.glob(f"*/{SIGNS[stage]}"):
            if path.is_dir() or path.stat().st_size:
                return [p for p in psutil.Process(process.pid).children(recursive=True) if _runs(p, stage)]
        time.sleep(0.002)
    raise AssertionError(f"{stage} was never seen at work")


def reproducible(project: Project) -> dict[str, bytes]:
    """Return all artifacts except those with measured speed."""
    timed = ("acceptance/served/", "report/")
    return {name: content for name, content in project.artifacts().items() if not name.startswith(timed)}


def _runs(process: psutil.Process, stage: str) -> bool:
    try:
        return stage.replace("_", "-") in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.parametrize("stage", SIGNS)
def test_sigkill_costs_seconds_and_no_bytes(finished: Project, project: Project, stage: str) -> None:
    for folder in ("demo", ".store"):
        shutil.rmtree(project.path / "results" / folder / stage)
    for whom in ("command", "snakemake"):
        process = subprocess.Popen(
            project.command(stage),
            cwd=project.path,
            env=project.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            workers = wait_for_work(project, stage, process)
        finally:
            if whom == "snakemake":
                os.kill(process.pid, signal.SIGKILL)
        for worker in workers:
            worker.kill()
        process.wait(60)
        psutil.wait_procs(workers, timeout=30)
        project.snakemake("--unlock")
    run = project.snakemake()
    assert {name.split("/")[0] for name in run.computed} == {stage}
    assert reproducible(project) == reproducible(finished)
    assert project.snakemake("-n").idle
