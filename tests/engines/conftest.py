"""Tiny targets for the engines' tests, and how to see that no process is left."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eagle3.target import Target
from tests.engines import targets

# In the environment of a process and so of all its children.
MARK = "EAGLE3_TEST_MARK"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_scripted(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def draft(llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_draft(tmp_path_factory.mktemp("draft") / "plain", llama)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have a mark in their environment, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark all processes that a test starts, and kill those that it leaves."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    for process in marked(value):
        process.kill()


@pytest.fixture
def gone(mark: str) -> Callable[[], None]:
    """Assert that within a minute no marked process is left."""

    def check() -> None:
        deadline = time.monotonic() + 60
        while left := marked(mark):
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.1)

    return check
