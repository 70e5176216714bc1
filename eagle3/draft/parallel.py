"""Several processes that train together on one host: one per GPU or, in tests, several on the CPU."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from eagle3.errors import Eagle3Error

T = TypeVar("T")


def world() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, 0 to world() - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait for the other processes."""
    if dist.is_initialized():
        dist.barrier()


def gather(value: list[T]) -> list[T]:
    """Return the lists of all processes, joined by rank."""
    if not dist.is_initialized():
        return value
    parts: list[list[T]] = [[] for _ in range(world())]
    dist.all_gather_object(parts, value)
    return [item for part in parts for item in part]


def any_process(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    return any(gather([flag]))


def launch(processes: int, work: Callable[[], None]) -> None:
    """Run `work` in several connected processes, and wait for them.

    SIGTERM is passed on. If a process fails, the others are stopped.

    Raises:
        Eagle3Error: the first process that failed raised it, or was killed.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-") as rendezvous:
        arguments = (processes, rendezvous, work)
        context = start_processes(_process, arguments, processes, join=False, start_method="spawn")
        assert context is not None

        def pass_on(number: int, _frame: FrameType | None) -> None:
            for process in context.processes:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            while not context.join():
                pass
        except ProcessExitedException as failure:
            if failure.signal_name not in {None, "SIGTERM"}:
                raise Eagle3Error(
                    f"process {failure.error_index} of {processes} was killed",
                    found=failure.signal_name,
                    remedy="check whether memory ran out (dmesg); the next run resumes from the last checkpoint",
                ) from None
            raise SystemExit(failure.exit_code) from None
        except ProcessRaisedException:
            message = Path(rendezvous, "error")
            if message.exists():
                raise Eagle3Error(message.read_text()) from None
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _process(number: int, processes: int, rendezvous: str, work: Callable[[], None]) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(number)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    store = f"file://{rendezvous}/store"
    dist.init_process_group(backend, init_method=store, rank=number, world_size=processes)
    try:
        work()
    except Eagle3Error as error:
        Path(rendezvous, "error").write_text(str(error))
        raise
    finally:
        dist.destroy_process_group()
