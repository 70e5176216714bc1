"""Runs a server for a job and ends it, with all its children, as soon as the job has ended, for whatever reason.

    python -m eagle3.engines.http.supervisor SCRATCH COMMAND...

The job holds the write end of this process's standard input. The kernel closes it when the job ends, even after a
SIGKILL. The server then gets SIGTERM, and processes that remain get SIGKILL; SCRATCH (a folder) is removed. If the
server ends on its own, this process ends with its exit status.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

# Seconds that a server has for a clean end before SIGKILL.
GRACE = 10.0
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(scratch: str, command: list[str]) -> int:
    """Run the server until it or the job ends; return the server's exit status."""
    libc = ctypes.CDLL(None)
    # Orphaned grandchildren (vLLM's engine processes after a crash of its API server) become our children.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner = os.getppid()
    asked_to_end = False

    def ask_to_end(_signal: int, _frame: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    signal.signal(signal.SIGTERM, ask_to_end)
    signal.signal(signal.SIGINT, ask_to_end)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # This process has one thread, so the child may run Python before exec.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        while server.poll() is None and not asked_to_end and os.getppid() == owner:
            if select.select([sys.stdin], [], [], 0.5)[0]:
                break
    finally:
        end_children()
        shutil.rmtree(scratch, ignore_errors=True)
    return server.wait()


def end_children() -> None:
    """End every process below this one; return when none is left."""
    start = time.monotonic()
    asked: set[psutil.Process] = set()
    while children := psutil.Process().children(recursive=True):
        patience = time.monotonic() - start
        for child in children:
            try:
                if patience > GRACE and (patience > 2 * GRACE or not _tidies_up(child)):
                    child.kill()
                elif child not in asked:
                    child.terminate()
            except psutil.NoSuchProcess:
                pass
        asked.update(children)
        psutil.wait_procs(children, timeout=0.2)


def _tidies_up(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which removes the shared memory of killed processes and ends last."""
    return any("resource_tracker" in word for word in process.cmdline())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
