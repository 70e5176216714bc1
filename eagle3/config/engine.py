"""Settings of the engine that runs the target model, and of the machine it runs on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings

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
