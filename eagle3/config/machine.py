"""`machine`: where things run, and how fast."""

from __future__ import annotations

from pydantic import Field

from eagle3.config.base import Settings


class MachineSettings(Settings):
    """Where things run, and how fast; never part of a key, so changing it reruns nothing."""

    device: str = "auto"
    """A torch device such as `cuda:1`. `auto` takes the first CUDA device, then Apple's GPU, then the CPU."""
    gpus: int = Field(default=0, ge=0)
    """GPUs claimed by each job that runs an engine, and by the training.

    Set it to all GPUs of the node if the target needs them."""
    threads: int = Field(default=2, ge=1)
    """CPU threads of a compute-heavy job."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints: the most that a killed training loses. On SIGTERM it loses none."""
    buffer_mb: int = Field(default=1024, ge=1)
    """Megabytes of memory for hidden states on their way from the engine to the disk.

    Raise it if the engine is faster than the disk in bursts."""
    base_url: str | None = None
    """URL of a running server, `http://host:port/v1`. Null: the job starts its own vLLM server and stops it.

    Required for `engine.name: openai`, which reads its key from `OPENAI_API_KEY`. Served acceptance needs null."""
    concurrency: int = Field(default=128, ge=1)
    """Maximum number of requests in flight.

    Lower it if the server runs out of KV cache and preempts requests. `eagle3 tune-concurrency` finds the best
    value."""
    request_timeout: float = Field(default=7200, gt=0)
    """Seconds to wait for one answer. A server that answers nothing for this long counts as hung.

    Raise it for very long reasoning."""
    startup_timeout: float = Field(default=3600, gt=0)
    """Seconds that a server may take to load the target."""
    engine_arguments: tuple[str, ...] = ()
    """Extra arguments of the vLLM server that only affect speed and memory: `[--gpu-memory-utilization, "0.9"]`.

    Arguments that affect the output go under `engine.arguments`."""
    tensorboard: str | None = None
    """Folder for TensorBoard logs of the training, one subfolder per run. Needs `pip install -e ".[tensorboard]"`.

    Set it to follow the training with `tensorboard --logdir FOLDER`."""
    wandb: str | None = None
    """Weights & Biases project that receives the training log. Needs `pip install -e ".[wandb]"`.

    Account, server and offline mode come from its own environment variables (`WANDB_API_KEY`, `WANDB_MODE`)."""
