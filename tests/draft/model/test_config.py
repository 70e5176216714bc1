"""What a draft model takes from the target's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from eagle3.config.draft import DraftSettings
from eagle3.draft.model.config import DraftConfig, draft_config
from eagle3.draft.unroll.rotary import rotary
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "vocab_size": 100,
}


def config_of(rope: dict[str, Any], key: str = "rope_parameters") -> DraftConfig:
    target = Target(Path("target"), "", SHAPE | {key: rope}, trust_remote_code=False)
    return draft_config(DraftSettings(), target, 50, (1, 2, 3))


def test_a_draft_is_rotated_whole_where_the_target_rotates_a_part() -> None:
    """Engines read the factor in the draft's config, and so do the frequencies of the scaled types."""
    draft = config_of({"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5})
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}


@pytest.mark.parametrize("written", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("config", "rotations", "extra"),
    [
        (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, {}),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, {"mrope_interleaved": True}),
    ],
    ids=["sections", "interleaved"],
)
def test_multimodal_rope_is_ordinary_rope_in_text(config: Any, rotations: Any, extra: Any, written: str) -> None:
    """Against the target's own rotation, which has a position for time, height and width each."""
    rope = {"mrope_section": [2, 3, 3], "rope_theta": 1000.0, **extra}
    target = config(**SHAPE, head_dim=16, rope_parameters={"rope_type": "default", **rope})
    cos, sin = rotations(target)(torch.zeros(1), torch.arange(128).expand(3, 1, -1))
    draft = config_of({"type": "mrope" if written == "rope_scaling" else "default", **rope}, written)
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}
    tables = rotary(draft, 128, torch.device("cpu"))
    torch.testing.assert_close(tables.cos, cos[0, :, :8])
    torch.testing.assert_close(tables.sin, sin[0, :, :8])


def test_rope_of_several_kinds_is_refused() -> None:
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(Eagle3Error, match=r"differs between layers(.|\n)*config.json(.|\n)*full_attention"):
        config_of(kinds)
