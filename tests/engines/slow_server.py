"""A server for tests of the lifecycle, with a child in its process group and one outside.

    python slow_server.py PORT (good | stubborn | never | crash)

`stubborn`: the children ignore SIGTERM. `never`: it is never ready. `crash`: it says why and dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); time.sleep(600)"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def main(port: int, manner: str) -> None:
    print("loading the weights", flush=True)
    child = CHILD.format("SIG_IGN" if manner == "stubborn" else "SIG_DFL")
    for apart in (False, True):
        subprocess.Popen([sys.executable, "-c", child], start_new_session=apart)
    if manner == "crash":
        print("RuntimeError: no kernel for this card", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if manner == "never":
        signal.pause()
    HTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
