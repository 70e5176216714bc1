"""GPUs are claimed by lock: two jobs never share one, and a dead job holds none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3 import gpus
from eagle3.errors import Eagle3Error

HOLD = """
import sys, time
from pathlib import Path
from eagle3 import gpus
gpus.LOCKS = Path(sys.argv[1])
with gpus.claim(int(sys.argv[2])) as mine:
    print(",".join(mine), flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(gpus, "LOCKS", tmp_path / "locks")
    return tmp_path / "locks"


def hold(node: Path, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(node), str(count)], stdout=subprocess.PIPE, text=True, env=os.environ
    )


def test_claims_are_disjoint_and_end_with_the_process(node: Path) -> None:
    other = hold(node, 2)
    try:
        assert other.stdout is not None
        theirs = set(other.stdout.readline().strip().split(","))
        with gpus.claim(2) as mine:
            assert len(theirs | set(mine)) == 4
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(mine)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    with gpus.claim(4) as mine:
        assert mine == ["0", "1", "2", "3"]


def test_a_claim_waits_until_gpus_are_free(node: Path) -> None:
    with gpus.claim(3):
        other = hold(node, 2)
        time.sleep(1.0)
        assert other.poll() is None
    assert other.stdout is not None
    assert len(other.stdout.readline().strip().split(",")) == 2
    other.kill()
    other.wait()


def test_more_than_there_are_is_an_error() -> None:
    with pytest.raises(Eagle3Error, match=r"machine\.gpus"), gpus.claim(5):
        pass


def test_none_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpus.claim(0) as mine:
        assert mine == []
