"""Settings of the engine that runs the target model, and of the machine it runs on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.settings import Settings

EngineName = Literal["transformers", "vllm", "openai"]


class EngineSettings(Settings):
    """What decides the tokens and hidden states that the engine returns; part of the artifacts' keys."""

    name: EngineName = "transformers"
    """`transformers` runs in process on any device; `vllm` is managed by us or already running elsewhere;
    `openai` is any compatible endpoint (responses only)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute type of the target. `auto`: the checkpoint's type on a GPU and on CPUs with bf16 units, else float32."""
    batch_size: int = Field(default=32, ge=1)
    """Sequences that the embedded engine runs at a time. Rounding depends on it, so it is part of the key."""
    model: str | None = None
    """The target's name at `machine.base_url`; null takes the only one that is served there."""
    arguments: tuple[str, ...] = ()
    """Further arguments of a managed vLLM that bear on its answers, such as `--reasoning-parser`, `--max-model-len`."""


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
