"""`machine`: where and how fast things run."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class MachineSettings(Settings):
    """How fast and where things run; never part of a key, so changing it reruns nothing."""

    device: str = "auto"
    """`auto`: the first CUDA device, then Apple's, then the CPU; or a torch device name."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that a rule with an engine, or the training, claims."""
    threads: int = Field(default=2, ge=1)
    """CPU threads for a compute-heavy job."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Optimiser steps of the training between checkpoints: what it loses at most when it is killed."""
    buffer_mb: int = Field(default=1024, ge=1)
    """Memory for hidden states on their way from the engine to the disk."""
    base_url: str | None = None
    """A server that already runs, as `http://host:port/v1`; null: vLLM is started and ended by the job itself."""
    concurrency: int = Field(default=128, ge=1)
    """Requests in flight at a server."""
    request_timeout: float = Field(default=7200, gt=0)
    """Seconds for one answer. A server that answers nothing at all for so long counts as hung."""
    startup_timeout: float = Field(default=3600, gt=0)
    """Seconds that a managed server may take to load the target."""
    engine_arguments: tuple[str, ...] = ()
    """Further arguments of a managed vLLM that only bear on speed and memory, such as `--gpu-memory-utilization`."""
    tensorboard: str | None = None
    """Folder in which the training writes its log for TensorBoard too, each run in a folder of its own."""
    wandb: str | None = None
    """Project of Weights & Biases to which the training sends its log."""
