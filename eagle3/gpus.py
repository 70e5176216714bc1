"""Claim GPUs by file locks: Snakemake counts them, but does not say which ones a job may use.

The kernel releases a lock when its process ends, for whatever reason.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.console import say
from eagle3.errors import Eagle3Error

if TYPE_CHECKING:
    import torch

LOCKS = Path(tempfile.gettempdir()) / "eagle3-gpus"


@contextmanager
def claim(count: int) -> Iterator[list[str]]:
    """Claim `count` GPUs, waiting for them if necessary, and make only those visible to CUDA; 0 claims none.

    Must be entered before CUDA is initialised in this process.

    Raises:
        Eagle3Error: the machine has fewer GPUs.
    """
    if count == 0:
        yield []
        return
    present = _devices()
    if len(present) < count:
        raise Eagle3Error(
            "this machine has fewer GPUs than a job needs",
            found=f"{len(present)} GPUs",
            expected=f"{count} (`machine.gpus`)",
            remedy="lower machine.gpus",
        )
    with ExitStack() as stack:
        claimed = _wait_for(count, present, stack)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claimed)
        try:
            yield claimed
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _wait_for(count: int, present: list[str], stack: ExitStack) -> list[str]:
    told = False
    while True:
        with ExitStack() as attempt:
            claimed: list[str] = []
            for device in present:
                if len(claimed) < count and _try_lock(device, attempt):
                    claimed.append(device)
            if len(claimed) == count:
                stack.push(attempt.pop_all())
                return claimed
        if not told:
            say(f"waiting for {count} free GPUs (claims: {LOCKS})")
            told = True
        time.sleep(2)


def _devices() -> list[str]:
    """Return the ids of the GPUs this process may use, without initialising CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device]
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return listing.stdout.split()


def _try_lock(device: str, stack: ExitStack) -> bool:
    LOCKS.mkdir(exist_ok=True)
    lock = stack.enter_context((LOCKS / f"{device}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def choose_device(name: str) -> torch.device:
    """Return the device of `machine.device`; `auto` prefers CUDA, then Apple's, then the CPU."""
    import torch

    if name != "auto":
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            # Triton and FlashAttention-4 launch on the current device, wherever their tensors are.
            torch.cuda.set_device(device)
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
