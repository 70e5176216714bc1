"""`hidden_states`: what is captured from the target, and how it is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle3.config.base import Settings


class HiddenStatesSettings(Settings):
    """What is captured from the target, and how it is stored."""

    shards: int = Field(default=1, ge=1)
    """Files per part.

    Aim for 5 to 70 GB per shard."""
    aux_layer_ids: Annotated[tuple[int, ...], Field(min_length=1, max_length=3)] | None = None
    """One to three layers, ascending, whose *input* the draft reads; null is the engines' default for n layers,
    (2, n//2, n-3).

    Fewer layers make the artifact smaller. Two load in vLLM 0.32 and SGLang 0.5.23; one loads in vLLM only."""
    encoding: Literal["lossless", "fp8"] = "lossless"
    """`fp8` stores the auxiliary states as e4m3 with one scale per token and layer, at a small loss.

    Set `fp8` if the disk is too small (`eagle3 plan` says so): it halves the auxiliary states."""
    min_teacher_agreement: float = Field(default=0.9, ge=0, le=1)
    """Minimum share of samples for which the engine's next token equals the one computed from the captured states.
    Below it, the stage fails: usually the wrong states were captured.

    Lower it only for an untrained test model, whose output is almost random."""
    max_failed: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of samples that may fail to be captured, after a second attempt. Above it, the stage fails; up
    to it, they are counted and left out of training."""
