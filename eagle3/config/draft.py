"""Settings of the draft model and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings
from eagle3.errors import Eagle3Error


class DraftSettings(Settings):
    """The network, the objective and the optimiser."""

    attention: Literal["gqa", "mla"] = "gqa"
    """`gqa`: Llama-type, loads in both engines; `mla`: DeepSeek-type, for targets whose config has `kv_lora_rank`."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the draft's MLP; null takes the target's."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """null takes the target's; likewise the number of key-value heads."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    fc_norm: bool = True
    """EAGLE-3.1: one RMSNorm per auxiliary state before `fc`."""
    norm_output: bool = True
    """EAGLE-3.1: feed the normed output to the next step."""
    norm_before_residual: bool = False
    """Portable drafts keep this off: SGLang does not know it."""
    start: Literal["target", "random"] = "target"
    """First weights of `fc`: `target` passes on the last auxiliary state, `random` mixes all of them at random. lm_head
    and final norm are the target's in both cases."""
    warm_start: str | None = None
    """Folder of an earlier draft, ours or in the format of vLLM and SGLang, whose weights are the first ones. Its
    draft vocabulary may differ."""
    unroll: int = Field(default=7, ge=1)
    """Steps of training-time test (T)."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of step t is decay^t."""
    sampled_unroll: bool = False
    """Compute step t on a random share decay^t of the positions with weight 1: same expectation, half the cost."""
    loss: Literal["kl", "ce", "lk_alpha", "lk_lambda"] = "kl"
    """`kl`: forward KL to the target on the draft vocabulary; `ce`: cross entropy with the target's greedy token;
    `lk_*`: acceptance losses (arXiv 2602.23881)."""
    true_mass: bool = False
    """KL against the target's true probabilities instead of those renormalised on the draft vocabulary. Renormalised,
    positions whose most likely token is outside the draft vocabulary carry no loss."""
    lk_scale: float = Field(default=1.0, ge=0, le=1)
    """`lk_lambda`: weight of the KL term where nothing would be accepted."""
    lk_decay: float = Field(default=1.0, ge=0)
    """`lk_lambda`: how fast that weight falls with the acceptance rate."""
    epochs: int = Field(default=1, ge=1)
    batch_tokens: int = Field(default=8192, ge=16)
    """Tokens of one packed row; longer samples get a row of their own."""
    accumulate: int = Field(default=1, ge=1)
    """Rows per optimiser step (over all GPUs)."""
    float8: bool = False
    """Matrix products of the layer in float8 (GPUs from Hopper and Ada on)."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon (arXiv 2502.16982) for the matrices of the layer and `fc`, AdamW for lm_head and the norms;
    `adamw`: AdamW for all."""
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.015, ge=0, lt=1)
    """Share of the steps with a rising learning rate; then cosine to 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices; norms are never decayed."""
    max_grad_norm: float = Field(default=0.5, gt=0)
    max_grad_growth: float = Field(default=100.0, gt=1)
    """A step whose gradient is longer than this many times the usual (a running mean) is skipped."""
    max_skipped: int = Field(default=5, ge=1)
    """Steps in a row that are skipped (they are counted) before the run stops: it decides whether there is a draft."""
    evaluate_every: int = Field(default=500, ge=1)
    """Optimiser steps between evaluations on the held-out split."""
    evaluate_drafts: int = Field(default=3, ge=1)
    """Drafts per step in the simulated acceptance length that picks the best checkpoint (at most `unroll`)."""
    log_every: int = Field(default=10, ge=1)
    """Optimiser steps between lines of the log, which is part of the artifact."""
    seed: int = 0

    def outside_files(self) -> list[Path]:
        """Return the weights and the configuration of the draft in `warm_start`, as far as they exist."""
        if self.warm_start is None:
            return []
        folder = Path(self.warm_start)
        # The stage reports what is missing.
        files = (folder / "model.safetensors", config_file(folder))
        return [path for path in files if path is not None and path.is_file()]

    def check_machine(self, device: str, gpus: int) -> None:
        """Raise Eagle3Error if this training cannot run, or would leave GPUs idle, on `machine.device` and `.gpus`."""
        if self.accumulate % max(gpus, 1):
            raise Eagle3Error(
                f"a training step of {self.accumulate} rows cannot be shared evenly by {gpus} GPUs",
                where="draft.accumulate and machine.gpus",
                remedy=f"set draft.accumulate to {gpus} or a multiple of it, and divide draft.batch_tokens if a step "
                "should not see more tokens than before",
            )
        if self.float8 and device.startswith(("cpu", "mps")):
            raise Eagle3Error(
                "this device does not support float8",
                where="draft.float8 and machine.device",
                found=device,
                remedy="set draft.float8 to false, or train on a GPU",
            )


def config_file(folder: Path) -> Path | None:
    """Return the configuration of a draft in `folder`: draft.json, else config.json; None if it has neither."""
    return next((folder / name for name in ("draft.json", "config.json") if (folder / name).is_file()), None)
