"""Warm start: weights of an earlier draft, whatever its vocabulary and its names for the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3.draft.settings import DraftSettings
from eagle3.draft.start import start, take_over
from eagle3.errors import Eagle3Error
from eagle3.target import Target
from tests.draft.conftest import H, V, random_draft, random_head, tiny_config


def test_the_draft_starts_as_a_reading_of_the_last_auxiliary_state_unless_told_otherwise() -> None:
    generator = torch.Generator().manual_seed(1)
    head, target = random_head(generator), Target(Path(), "", {}, trust_remote_code=False)
    aux = torch.randn(5, 3 * H, generator=generator)
    for settings, reads in ((DraftSettings(), True), (DraftSettings(start="random"), False)):
        draft = random_draft(tiny_config(), generator)
        start(draft, settings, target, head)
        assert torch.equal(draft.fc(aux), aux[:, -H:]) == reads
        assert torch.equal(draft.lm_head.weight, head.lm_head[draft.target_ids])
        assert torch.equal(draft.norm.weight, head.norm)


@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer."])
def test_weights_are_taken_over_and_head_rows_matched_by_token(prefix: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    old = random_draft(tiny_config(draft_vocab_size=30), generator)
    new = random_draft(tiny_config(draft_vocab_size=50), generator)
    tensors = {name.replace("layers.0.", prefix): value.bfloat16() for name, value in old.named_parameters()}
    extra = {"d2t": old.d2t, "t2d": old.t2d, "embed_tokens.weight": torch.zeros(V, H)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    before = new.lm_head.weight.detach().clone()
    take_over(new, tmp_path)
    for (name, ours), theirs in zip(new.named_parameters(), old.parameters(), strict=True):
        if name != "lm_head.weight":
            assert torch.equal(ours, theirs.bfloat16().float())
    rows = {token: row for row, token in enumerate(old.target_ids.tolist())}
    shared = 0
    for place, token in enumerate(new.target_ids.tolist()):
        known = token in rows
        shared += known
        expected = old.lm_head.weight[rows[token]].bfloat16().float() if known else before[place]
        assert torch.equal(new.lm_head.weight[place], expected)
    assert 0 < shared < 50


def test_a_draft_without_a_head_is_refused(tmp_path: Path) -> None:
    draft = random_draft(tiny_config(), torch.Generator().manual_seed(1))
    save_file({n: p for n, p in draft.state_dict().items() if n != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(Eagle3Error, match=r"not built like this one(.|\n)*lm_head.weight': 'missing'"):
        take_over(draft, tmp_path)


def test_a_draft_of_another_shape_is_refused_with_its_tensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    old = random_draft(tiny_config(intermediate_size=20, fc_norm=True), generator)
    save_file(dict(old.state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(Eagle3Error, match="not built like this one") as error:
        take_over(random_draft(tiny_config(), generator), tmp_path)
    assert "mlp.up_proj" in str(error.value)
    assert "fc_norm.1" in str(error.value)
    assert "lm_head" not in str(error.value)
