"""The real vLLM ends with its job, and is restarted once when it is lost during a run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import GenerationRequest, Sampling, open_engine
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target
from tests.engines.conftest import REAL_VLLM, Family

pytestmark = REAL_VLLM

SETTINGS = EngineSettings(name="vllm", dtype="float32")
MACHINE = MachineSettings(
    threads=1, concurrency=4, request_timeout=30, engine_arguments=("--kv-cache-memory-bytes", "200M")
)
JOB = """
import sys
from pathlib import Path
from eagle3.engines.base import GenerationRequest, Sampling, open_engine
from eagle3.target.pin import Target
from tests.engines.test_vllm_lifecycle import MACHINE, SETTINGS, ask

target = Target(Path(sys.argv[1]), "test", {"eagle3_eos_token_ids": [0], "dtype": "float32"}, False)
with open_engine(SETTINGS, MACHINE, target, Path(sys.argv[2])) as engine:
    for answer in engine.generate([ask(n) for n in range(100000)], Sampling(400)):
        Path(sys.argv[2], "answered").touch()
        if sys.argv[3] == "exception":
            raise RuntimeError("the job fails")
        if sys.argv[3] == "normal":
            break
"""


def ask(number: int) -> GenerationRequest:
    return GenerationRequest(id=f"r{number}", messages=[{"role": "user", "content": f"apples {number}"}], seed=number)


def shared_memory() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir() if file.name.startswith(("psm_", "eagle3-"))}


@pytest.mark.parametrize(
    ("manner", "when", "end"),
    [
        ("normal", "answering", None),
        ("exception", "answering", None),
        ("wait", "loading", signal.SIGINT),
        ("wait", "loading", signal.SIGTERM),
        ("wait", "answering", signal.SIGKILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_of_vllm_is_left_however_the_job_ends(
    manner: str,
    when: str,
    end: signal.Signals | None,
    llama: Target,
    tmp_path: Path,
    family: Family,
) -> None:
    before = shared_memory()
    job = subprocess.Popen([sys.executable, "-c", JOB, str(llama.path), str(tmp_path), manner])
    while job.poll() is None and not family.named("EngineCore"):
        time.sleep(0.1)
    if end is not None:
        while when == "answering" and not (tmp_path / "answered").exists():
            time.sleep(0.1)
        assert job.poll() is None
        job.send_signal(end)
    job.wait(200)
    family.assert_gone()
    assert shared_memory() <= before


def test_one_loss_is_survived_and_the_second_ends_the_run(llama: Target, tmp_path: Path, family: Family) -> None:
    """First the engine process is killed; then it is stopped, so that requests hang."""
    with open_engine(SETTINGS, MACHINE, llama, tmp_path) as engine:
        requests = [ask(number) for number in range(24)]
        undisturbed = {answer.id: answer.token_ids for answer in engine.generate(requests, Sampling(200))}
        disturbed: dict[str, list[int]] = {}
        for answer in engine.generate(requests, Sampling(200)):
            if not disturbed:
                family.named("EngineCore")[0].kill()
            assert answer.id not in disturbed
            disturbed[answer.id] = answer.token_ids
        assert disturbed == undisturbed
        answers = engine.generate(requests, Sampling(200))
        next(answers)
        family.named("EngineCore")[0].suspend()
        with pytest.raises(Eagle3Error, match="vLLM was lost twice") as caught:
            list(answers)
        assert "no answer to any request for 30 s" in caught.value.problem
    assert (tmp_path / ".vllm.log").read_text().count("Application startup complete") == 2
