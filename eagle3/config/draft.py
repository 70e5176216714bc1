"""`draft`: the network and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from eagle3.config.base import Settings
from eagle3.errors import Eagle3Error


class DraftSettings(Settings):
    """The network, the objective and the optimizer."""

    attention: Literal["gqa", "mla"] = "gqa"
    """`gqa`: a Llama-type draft, which loads in vLLM and SGLang. `mla`: a DeepSeek-type draft, for targets whose
    config has `kv_lora_rank` (DeepSeek, Kimi).

    `mla` needs a smaller KV cache at the same quality. Without a GPU, vLLM serves an MLA target only with an MLA
    draft."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the draft's MLP; null takes the target's.

    Set it for mixture-of-experts targets, whose own value is that of one expert."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; null takes the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key-value heads; null takes the target's."""
    fc_norm: bool = True
    """EAGLE-3.1: one RMSNorm per auxiliary state before `fc`, since their scales differ widely.

    Turn it and `norm_output` off for an engine that does not support them."""
    norm_output: bool = True
    """EAGLE-3.1: feed the normed output to the next step.

    Set it together with `fc_norm`."""
    norm_before_residual: bool = False
    """Variant of the decoder layer that vLLM supports and SGLang does not.

    Leave it off for a draft that loads in both."""
    start: Literal["target", "random"] = "target"
    """Initial weights of `fc`: `target` passes on the last auxiliary state, `random` mixes all of them at random.
    lm_head and final norm are the target's in both cases.

    `target` is ahead on little data, `random` on fifty times as much."""
    warm_start: str | None = None
    """Folder of an earlier draft, ours or in the format of vLLM and SGLang, whose weights to start from. Its
    vocabulary may differ; its other settings must equal these. Its content is part of the key.

    Set it to continue from a published draft, or after the data has grown."""
    unroll: int = Field(default=7, ge=1)
    """TTT steps (T): how many steps the draft is trained to run on its own output. The cost grows with it, memory
    barely does.

    At least `acceptance.drafts`. For 3 draft tokens, 4 is enough on SmolLM2."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """The loss of step t has weight decay^t.

    Raise it if acceptance drops quickly at later positions."""
    sampled_unroll: bool = False
    """Compute step t on a random share decay^t of the positions, with weight 1: the same expected gradient at
    about half the cost.

    Set it for large targets. With small ones, launching kernels takes longer than computing."""
    loss: Literal["kl", "ce", "lk_alpha", "lk_lambda"] = "kl"
    """`kl`: forward KL to the target on the draft vocabulary. `ce`: cross entropy with the target's greedy token.
    `lk_*`: acceptance losses (arXiv 2602.23881)."""
    true_mass: bool = False
    """KL against the target's true probabilities. By default they are renormalised on the draft vocabulary, and
    positions whose most likely token is outside it carry no loss.

    Try it if the vocabulary's coverage is low."""
    lk_scale: float = Field(default=1.0, ge=0, le=1)
    """`lk_lambda`: weight of the KL term where nothing would be accepted."""
    lk_decay: float = Field(default=1.0, ge=0)
    """`lk_lambda`: how fast that weight falls as the acceptance rate rises."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data.

    2 or 3 for hundreds of thousands of samples, more for fewer: stop where the held-out acceptance length in the
    report starts to fall."""
    batch_tokens: int = Field(default=8192, ge=16)
    """Tokens of one packed row. A longer sample gets a row of its own.

    If memory runs out, lower it and raise `accumulate` by the same factor."""
    accumulate: int = Field(default=1, ge=1)
    """Rows per optimizer step, over all GPUs. The result does not depend on the number of GPUs, except for rounding.

    Must be a multiple of `machine.gpus`."""
    float8: bool = False
    """Compute the layer's matrix products in float8 during training. lm_head, the gradients of weights and the
    evaluation stay in bf16.

    For GPUs from Hopper and Ada on: about 11% more tokens per second at the size of Llama-3.1-8B."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon (arXiv 2502.16982) for the matrices of the layer and `fc`, AdamW for lm_head and the norms.
    `adamw`: AdamW for everything.

    Muon helps only with `fc_norm` and `norm_output`. On a CPU, AdamW's steps are much cheaper."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate.

    With Muon: 2e-3 to 4e-3 for SmolLM2, 1e-3 for a hidden size of 4,096, half of that from 7,000 on (the last two
    are not measured). With AdamW: 1e-3 to 2e-3, 1e-4 and 5e-5."""
    warmup: float = Field(default=0.015, ge=0, lt=1)
    """Share of the steps in which the learning rate rises. Then it falls to 0 along a cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices. Norms are never decayed."""
    max_grad_norm: float = Field(default=0.5, gt=0)
    """Gradients with a larger norm are scaled down to it."""
    max_grad_growth: float = Field(default=100.0, gt=1)
    """A step is skipped if its gradient norm is larger than this many times the running mean, or not finite."""
    max_skipped: int = Field(default=5, ge=1)
    """Number of consecutive skipped steps after which the training stops and names their samples."""
    evaluate_every: int = Field(default=500, ge=1)
    """Optimizer steps between evaluations on the held-out split."""
    evaluate_drafts: int = Field(default=3, ge=1)
    """Draft tokens per step in the simulated acceptance length that selects the best weights. At most `unroll`.

    Set it to `acceptance.drafts`."""
    log_every: int = Field(default=10, ge=1)
    """Optimizer steps between lines of the log. The log is part of the artifact, so a change retrains."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data in each epoch. Follows the top-level `seed` unless
    set."""

    def outside_files(self) -> list[Path]:
        """Return the weights and the configuration of the draft in `warm_start`, if they exist."""
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
                f"a training step of {self.accumulate} rows cannot be split evenly over {gpus} GPUs",
                where="draft.accumulate and machine.gpus",
                remedy=f"set draft.accumulate to {gpus} or a multiple of it, and lower draft.batch_tokens to keep the "
                "number of tokens per step",
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
