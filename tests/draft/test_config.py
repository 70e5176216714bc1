"""What a draft takes over from the target's config."""

from __future__ import annotations

from pathlib import Path

from eagle3.draft.config import draft_config
from eagle3.draft.settings import DraftSettings
from eagle3.target import Target


def test_a_draft_is_rotated_whole_where_the_target_rotates_a_part() -> None:
    """Engines heed the factor in the draft's config, and so do the frequencies of the scaled types."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": 100,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    }
    draft = draft_config(DraftSettings(), Target(Path(), "", config, trust_remote_code=False), 50, (1, 2, 3))
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}
