"""A job that owns a server, for tests of how the server ends with it.

python -m tests.engines.owner FOLDER (normal | exception | wait) MANNER-OF-THE-SERVER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from eagle3.engines.http.server import Server, free_port
from tests.engines import slow_server


def main(folder: Path, manner: str, server: str) -> None:
    port = free_port()
    command = [sys.executable, slow_server.__file__, str(port), server]
    scratch = folder / "scratch"
    scratch.mkdir()
    with Server(
        "the server",
        command,
        port=port,
        environment=dict(os.environ),
        log=folder / "log",
        startup_timeout=60,
        scratch=scratch,
    ):
        (folder / "ready").touch()
        if manner == "exception":
            raise RuntimeError("the job fails")
        if manner == "wait":
            time.sleep(600)


if __name__ == "__main__":
    # Ignored signals are inherited, for instance from `nohup`.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    main(Path(sys.argv[1]), *sys.argv[2:])
