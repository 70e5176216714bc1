"""What is reported about a training process that is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from eagle3.draft import parallel
from eagle3.errors import Eagle3Error


def one_is_killed() -> None:
    if parallel.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_killed_process_ends_the_others_and_is_named() -> None:
    with pytest.raises(Eagle3Error, match="process 1 of 2 was killed") as error:
        parallel.launch(2, one_is_killed)
    assert "SIGKILL" in str(error.value)
