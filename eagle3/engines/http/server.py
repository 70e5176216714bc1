"""A server that is started for a job and ends with it, even when the job is killed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import httpx2

from eagle3.console import say
from eagle3.errors import Eagle3Error

# Seconds between two checks of a loading server, or of GPU memory that is being freed.
_POLL = 0.25
# Seconds that the driver may take to free the memory of ended processes.
_MEMORY_DEADLINE = 120.0
# MiB by which GPU memory may differ from before (other users' contexts).
_MEMORY_SLACK = 512


class Server:
    """A server process on the loopback interface, as a context manager.

    Args:
        name: its name in messages.
        command: starts it; it must answer `GET /health` with 200 when ready.
        port: the port that `command` makes it listen on.
        environment: its complete environment.
        log: file to which its output is appended.
        startup_timeout: seconds it may take to be ready.
        scratch: a folder that is removed when the server has ended, for whatever reason.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        environment: Mapping[str, str],
        log: Path,
        startup_timeout: float,
        scratch: Path | None = None,
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._startup_timeout = startup_timeout
        self._scratch = scratch
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._memory_before: list[int] = []

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server; return when it is ready.

        Raises:
            Eagle3Error: it ended, or was not ready in time.
        """
        self._memory_before = gpu_memory()
        with self.log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "eagle3.engines.http.supervisor", str(self._scratch or ""), *self._command],
                # Never written to: the kernel closes this pipe when this process ends, and the supervisor notices.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                # Ctrl-C in the terminal must reach this process only, which then ends the server in order.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server; return when its processes are gone and its GPU memory is free."""
        if self._supervisor is None:
            return
        supervisor, self._supervisor = self._supervisor, None
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        supervisor.wait()
        _wait_for_memory(self._memory_before, self.name)

    @property
    def alive(self) -> bool:
        """Whether the process runs, healthy or not."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def last_lines(self, count: int = 12) -> str:
        """Return the end of the log: the last lines that name an error if there are any, else the last lines."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, maxlen=2000)
        # A crash of vLLM ends in pages of traceback and leak reports; these lines say what happened.
        errors = dict.fromkeys(
            line for line in lines if re.search(r"\b\w*(Error|Exception): |\bERROR\b.*\berror\b", line)
        )
        return "".join([*(errors or lines)][-count:]).strip() or "(nothing)"

    def fault(self, problem: str, remedy: str) -> Eagle3Error:
        """Return an error about this server that shows the last lines of its log."""
        return Eagle3Error(
            problem,
            where=self.log,
            found="its last lines are\n" + self.last_lines(),
            remedy=remedy,
        )

    def _wait_until_ready(self) -> None:
        start = time.monotonic()
        say(f"starting {self.name}; log: {self.log}")
        while not healthy(self.url):
            if not self.alive:
                raise self.fault(
                    f"{self.name} ended while starting",
                    "fix what these lines report; see `engine` in the configuration",
                )
            if time.monotonic() - start > self._startup_timeout:
                raise self.fault(
                    f"{self.name} was not ready after {self._startup_timeout:.0f} s",
                    "raise machine.startup_timeout if it was still loading",
                )
            time.sleep(_POLL)
        say(f"{self.name} was ready after {time.monotonic() - start:.0f} s")


def get(url: str, timeout: float = 10.0) -> str:
    """Return the body of a GET, without a proxy on this machine.

    Raises:
        httpx2.HTTPError: there is no answer, or its status is not a success.
    """
    return _client(is_loopback(url)).get(url, timeout=timeout).raise_for_status().text


@cache
def _client(is_loopback: bool) -> httpx2.Client:
    """Return a client that keeps no connections; making one loads certificates, which takes 50 ms."""
    limits = httpx2.Limits(max_keepalive_connections=0)
    return httpx2.Client(trust_env=not is_loopback, follow_redirects=True, limits=limits)


def healthy(url: str) -> bool:
    """Whether a server answers `GET {url}/health` with success."""
    try:
        get(f"{url}/health")
    except httpx2.HTTPError:
        return False
    return True


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine; a proxy would not lead back to it."""
    return httpx2.URL(url).host in ("127.0.0.1", "localhost", "::1")


def free_port() -> int:
    """Return a port of the loopback interface that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scratch_folder() -> Path:
    """Return a new folder for short-lived files: in memory if the system has such a file system."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30 else None
    return Path(tempfile.mkdtemp(prefix="eagle3-", dir=parent))


def gpu_memory() -> list[int]:
    """Return the used memory in MiB of every GPU that this process may use; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += ["-i", visible] if visible else []
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) for line in answer.stdout.split()] if answer.returncode == 0 else []


def _wait_for_memory(before: Sequence[int], name: str) -> None:
    """Wait until the GPUs use no more memory than before: the next stage needs it at once."""
    start = time.monotonic()
    while any(now > then + _MEMORY_SLACK for now, then in zip(gpu_memory(), before, strict=False)):
        if time.monotonic() - start > _MEMORY_DEADLINE:
            raise Eagle3Error(
                f"GPU memory was not freed after {name} ended",
                found=f"{gpu_memory()} MiB used",
                expected=f"at most {list(before)} MiB (as before)",
                remedy="look for leftover processes with nvidia-smi",
            )
        time.sleep(_POLL)
