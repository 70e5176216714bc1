"""The lifecycle of a managed server: whatever ends the job, nothing of the server is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eagle3.engines.http.server import Server, free_port, healthy, scratch_folder
from eagle3.errors import Eagle3Error
from tests.engines import slow_server
from tests.engines.conftest import Family


def server(folder: Path, manner: str, **options: float) -> Server:
    port = free_port()
    return Server(
        "the server",
        [sys.executable, slow_server.__file__, str(port), manner],
        port=port,
        environment=dict(os.environ),
        log=folder / "log",
        startup_timeout=options.get("startup_timeout", 60),
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("manner", "end", "children"),
    [
        ("normal", None, "good"),
        ("exception", None, "good"),
        ("wait", signal.SIGTERM, "good"),
        ("wait", signal.SIGINT, "good"),
        ("wait", signal.SIGHUP, "good"),
        ("wait", signal.SIGKILL, "good"),
        ("wait", signal.SIGKILL, "stubborn"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_is_left_however_the_job_ends(
    manner: str, end: signal.Signals | None, children: str, tmp_path: Path, family: Family
) -> None:
    job = subprocess.Popen([sys.executable, "-m", "tests.engines.owner", str(tmp_path), manner, children])
    wait_for((tmp_path / "ready").exists)
    if end is not None:
        assert len(family.processes()) == 5, (
            "job, supervisor, server, its child in the process group and the one outside"
        )
        job.send_signal(end)
    job.wait(60)
    family.assert_gone()
    assert not (tmp_path / "scratch").exists()


def test_a_killed_supervisor_takes_the_server_along(tmp_path: Path, family: Family) -> None:
    with server(tmp_path, "good") as running:
        assert running.alive
        (child,) = family.named("eagle3.engines.http.supervisor")
        (front,) = child.children()
        child.kill()
        psutil.wait_procs([front], timeout=30)
        assert not front.is_running()
        assert not running.alive


def test_a_crash_while_starting_shows_what_the_server_said(tmp_path: Path, family: Family) -> None:
    with pytest.raises(Eagle3Error, match="RuntimeError: no kernel for this card") as caught, server(tmp_path, "crash"):
        pass
    assert "ended while starting" in caught.value.problem
    family.assert_gone()


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path, family: Family) -> None:
    never = server(tmp_path, "never", startup_timeout=2)
    with pytest.raises(Eagle3Error, match="loading the weights") as caught, never:
        pass
    assert "was not ready after 2 s" in caught.value.problem
    assert "machine.startup_timeout" in str(caught.value)
    family.assert_gone()


def test_a_server_that_ends_during_a_run_is_noticed(tmp_path: Path, family: Family) -> None:
    with server(tmp_path, "good") as running:
        (child,) = family.named("eagle3.engines.http.supervisor")
        child.children()[0].kill()
        wait_for(lambda: not running.alive)
        assert not healthy(running.url)
    family.assert_gone()


def test_the_log_is_kept_over_a_second_start(tmp_path: Path) -> None:
    for _ in range(2):
        with server(tmp_path, "good"):
            pass
    assert (tmp_path / "log").read_text().count("loading the weights") == 2


def test_last_lines_prefer_the_ones_that_name_an_error(tmp_path: Path) -> None:
    quiet = server(tmp_path, "good")
    (tmp_path / "log").write_text("".join(["ValueError: no such layer\n", *("leaked object\n" for _ in range(50))]))
    assert quiet.last_lines() == "ValueError: no such layer"
    (tmp_path / "log").write_text("one\ntwo\n")
    assert quiet.last_lines() == "one\ntwo"


def test_scratch_folders_are_private() -> None:
    folder = scratch_folder()
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()
