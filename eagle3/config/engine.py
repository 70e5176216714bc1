"""`engine`: what runs the target model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings

EngineName = Literal["transformers", "vllm", "openai"]


class EngineSettings(Settings):
    """What determines the tokens and hidden states that the engine returns; part of the artifacts' keys."""

    name: EngineName = "transformers"
    """`transformers` runs in the job's own process, on any device. `vllm` must be installed. `openai` is any
    compatible endpoint, for responses only.

    `transformers` for the demo and small targets, `vllm` for everything large."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type the target computes in. `auto` is the checkpoint's type on GPUs and on CPUs with bf16 support,
    `float32` elsewhere.

    Set the type you serve with."""
    batch_size: int = Field(default=32, ge=1)
    """Sequences that `transformers` computes at a time.

    Lower it if memory runs out. Rounding depends on the batch, so a change reruns."""
    model: str | None = None
    """Name of the target on the server at `machine.base_url`; null takes the only one."""
    arguments: tuple[str, ...] = ()
    """Extra arguments of the vLLM server that affect its output: `[--max-model-len, "32768", --reasoning-parser,
    kimi_k2]`.

    Arguments that only affect speed and memory go under `machine.engine_arguments`."""
