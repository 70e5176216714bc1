"""The target model, pinned: where it is, exactly which one, and its shape, as later stages need it.

Every stage reads this module; how a target is found and checked is in `eagle3.target.model_folder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.files.records import read_json


@dataclass(frozen=True)
class Target:
    """A pinned target, read from `target.json`.

    Attributes:
        path: the folder with config.json, tokenizer and safetensors.
        revision: identifies the contents (`sha256:...`, see `model_folder.revision`).
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


def load_target(pin: Path) -> Target:
    """Read `target.json`."""
    value = read_json(pin)
    return Target(
        path=(pin.parent / value["path"]).resolve(),
        revision=value["revision"],
        config=value["config"],
        trust_remote_code=value["trust_remote_code"],
    )
