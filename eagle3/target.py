"""The target model, pinned: where it is, exactly which one, and what later stages must know of its shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.records import read_json
from eagle3.settings import Settings

if TYPE_CHECKING:
    import torch


class TargetSettings(Settings):
    """Which model is to be served faster."""

    model: str = "smollm2-135m-instruct"
    """`smollm2-135m-instruct` (the demo, made from a pinned PyPI wheel), a local folder, or a hub id."""
    revision: str | None = None
    """Revision of a hub id: a commit, for a run that can be repeated."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


@dataclass(frozen=True)
class Target:
    """A pinned target, read from `target.json`.

    Attributes:
        path: the folder with config.json, tokenizer and safetensors.
        revision: what identifies the weights (`sha256:...` over all files).
        config: the text model's config (`text_config` where the model nests it).
        trust_remote_code: as the user set it.
    """

    path: Path
    revision: str
    config: dict[str, Any]
    trust_remote_code: bool

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def aux_layer_ids(self) -> tuple[int, int, int]:
        """The default taps of vLLM and SGLang: the residual stream entering layers 2, n//2 and n-3."""
        return (2, self.num_layers // 2, self.num_layers - 3)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation (generation_config.json, then config.json)."""
        return tuple(self.config["eagle3_eos_token_ids"])


@dataclass(frozen=True)
class HeadWeights:
    """The target's own ends: what the teacher and the draft's start need. All in the checkpoint's dtype."""

    embedding: torch.Tensor
    """[V, H]"""
    norm: torch.Tensor
    """[H], the final norm's weight"""
    lm_head: torch.Tensor
    """[V, H]; the embedding itself where the model ties them"""
    rms_norm_eps: float


def load_target(pin: Path) -> Target:
    """Read `target.json`."""
    value = read_json(pin)
    return Target(
        path=(pin.parent / value["path"]).resolve(),
        revision=value["revision"],
        config=value["config"],
        trust_remote_code=value["trust_remote_code"],
    )
