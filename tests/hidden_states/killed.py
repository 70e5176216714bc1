"""Runs captures with the tiny engine that kill themselves: `killed.py TARGET SAMPLES RUN...`.

A RUN is `FOLDER,BATCH,KILL_AFTER,LIMIT`: KILL_AFTER captures are given out before SIGKILL, LIMIT is the largest size of
a file, as on a full disk (-1: none). Every run is a process of its own, forked from one that has imported everything;
their exit codes are printed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from eagle3.config.engine import EngineSettings
from eagle3.config.hidden_states import HiddenStatesSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture
from eagle3.stages import hidden_states as capture
from tests.hidden_states.conftest import TinyEngine


class BatchEngine(TinyEngine):
    """Its states depend on what is computed together, as rounding does."""

    kill_after = -1

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        assert self.batch_size is None or len(sequences) <= self.batch_size
        nudge = 1 + (sum(map(len, sequences)) % 101) / 50 if self.batch_size else 1.0
        for found in super().capture(sequences, layer_ids):
            if self.kill_after == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.kill_after -= 1
            # A change of scale does not change what the norm makes of the last state.
            yield Capture(found.token_ids, found.states * nudge, found.next_token)


def run(target: str, samples: str, folder: str, batch: str, kill_after: str, limit: str) -> None:
    torch.set_num_threads(1)
    if int(limit) >= 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    model = LlamaForCausalLM.from_pretrained(Path(target).parent / "model").eval()
    engine = BatchEngine(model, batch_size=int(batch) or None)
    engine.kill_after = int(kill_after)
    vars(capture)["open_engine"] = lambda *_: engine
    Path(folder).mkdir(exist_ok=True)
    capture.make(
        HiddenStatesSettings(shards=2),
        EngineSettings(),
        MachineSettings(threads=2),
        target=Path(target),
        samples=Path(samples),
        folder=Path(folder),
    )


def main(target: str, samples: str, *runs: str) -> None:
    for one in runs:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            run(target, samples, *one.split(","))
            os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
