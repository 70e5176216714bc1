"""Training speed on GPUs: `timing.jsonl`, the only file of the artifact that differs between identical runs."""

from __future__ import annotations

import time
from typing import Any

import torch

from eagle3.draft import parallel
from eagle3.draft.data.row import Row
from eagle3.draft.model.config import DraftConfig
from eagle3.draft.training.flops import training_flops


class Timing:
    """Counts the work of one process between two lines of the log."""

    def __init__(self, config: DraftConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rate = matmul_rate(device)
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.started, self.waited, self.flops, self.tokens, self.supervised = time.perf_counter(), 0.0, 0.0, 0, 0

    def wait(self, seconds: float) -> None:
        """Count time spent waiting for a row."""
        self.waited += seconds

    def add(self, row: Row) -> None:
        """Count a row."""
        self.flops += training_flops(self.config, row)
        self.tokens += len(row.positions)
        self.supervised += len(row.order)

    def read(self, step: int) -> dict[str, Any]:
        """Return the rates since the last call; the device must be synchronised."""
        seconds, processes = time.perf_counter() - self.started, parallel.world()
        line = {
            "step": step,
            "tokens_per_second": self.tokens * processes / seconds,
            "supervised_tokens_per_second": self.supervised * processes / seconds,
            "waiting_share": self.waited / seconds,
            "tflops_per_gpu": self.flops / seconds / 1e12,
            "share_of_matmul_rate": self.flops / seconds / self.rate,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30,
        }
        self.restart()
        return line


def matmul_rate(device: torch.device) -> float:
    """Measure the device's rate in bf16 matrix products, in FLOP/s: the real one, not the data sheet's."""
    size, repeats = 8192, 20
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, a)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 * repeats / min(seconds)
