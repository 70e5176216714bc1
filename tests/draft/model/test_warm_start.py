"""The weights that training starts from: the target's, or those of an earlier draft model in any format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.config.draft import DraftSettings
from eagle3.draft.model.config import DraftConfig
from eagle3.draft.model.initialization import initialize
from eagle3.draft.model.network import Draft
from eagle3.draft.model.warm_start import load_warm_start
from eagle3.errors import Eagle3Error
from eagle3.export.formats import plain_config, speculators_config
from eagle3.target.pin import Target
from tests.draft.conftest import H, V, random_draft, random_head, tiny_config
from tests.drafts import exported, new_draft, save_draft
from tests.engines import targets

# The tiny drafts read the inputs of its layers 1, 2 and 3; the default taps are 2, 3 and 3.
TARGET = Target(Path("target"), "", {"hidden_size": H, "num_hidden_layers": 6}, trust_remote_code=False)
LATENT_TARGET = Target(Path("target"), "", TARGET.config | {"kv_lora_rank": 16}, trust_remote_code=False)
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def new(**changes: Any) -> Draft:
    return random_draft(tiny_config(**changes), torch.Generator().manual_seed(1))


def save_plain(config: dict[str, Any], folder: Path, weights: Draft) -> Path:
    """Write a draft as vLLM and SGLang read it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights.state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_draft_starts_as_a_reading_of_the_last_auxiliary_state_unless_told_otherwise() -> None:
    generator = torch.Generator().manual_seed(1)
    head, target = random_head(generator), Target(Path(), "", {}, trust_remote_code=False)
    aux = torch.randn(5, 3 * H, generator=generator)
    for settings, reads in ((DraftSettings(), True), (DraftSettings(start="random"), False)):
        draft = random_draft(tiny_config(), generator)
        initialize(draft, settings, target, head)
        assert torch.equal(draft.fc(aux), aux[:, -H:]) == reads
        assert torch.equal(draft.lm_head.weight, head.lm_head[draft.target_ids])
        assert torch.equal(draft.norm.weight, head.norm)


@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer."])
def test_weights_are_taken_over_and_head_rows_matched_by_token(prefix: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    old = random_draft(tiny_config(draft_vocab_size=30), generator)
    new = random_draft(tiny_config(draft_vocab_size=50), generator)
    save_draft(old, tmp_path)
    tensors = {name.replace("layers.0.", prefix): value.bfloat16() for name, value in old.named_parameters()}
    extra = {"d2t": old.d2t, "t2d": old.t2d, "embed_tokens.weight": torch.zeros(V, H)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    before = new.lm_head.weight.detach().clone()
    load_warm_start(new, tmp_path, TARGET)
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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d2t: d2t + V, rf"tokens that the target does not have(.|\n)*d2t(.|\n)*41 ids(.|\n)*0 to {V - 1}"),
        (lambda d2t: d2t - V, r"does not have(.|\n)*d2t(.|\n)*41 ids, the first of them -"),
        (lambda d2t: d2t[:-1], r"does not fit its lm_head(.|\n)*40 tokens(.|\n)*41"),
        (lambda d2t: None, r"does not have(.|\n)*tensor lm_head.weight(.|\n)*3 ids, the first of them 97"),
    ],
    ids=["beyond", "below", "short", "whole"],
)
def test_a_vocabulary_of_another_target_is_refused(damage: Any, said: str, tmp_path: Path) -> None:
    """Ids are checked before they are used as indices; without a map they are the rows of lm_head."""
    old = new()
    save_draft(old, tmp_path)
    tensors = dict(old.state_dict())
    d2t = damage(tensors.pop("d2t"))
    if d2t is None:
        tensors["lm_head.weight"] = torch.zeros(V + 3, H)
    else:
        tensors["d2t"] = d2t
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Eagle3Error, match=said):
        load_warm_start(new(), tmp_path, TARGET)


def test_a_draft_without_a_head_is_refused(tmp_path: Path) -> None:
    draft = new()
    save_draft(draft, tmp_path)
    save_file({n: p for n, p in draft.state_dict().items() if n != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(Eagle3Error, match=r"do not fit this draft(.|\n)*lm_head.weight': 'missing'"):
        load_warm_start(draft, tmp_path, TARGET)


def test_weights_that_do_not_fit_their_own_config_are_refused_with_their_tensors(tmp_path: Path) -> None:
    save_plain(plain_config(tiny_config(), TARGET), tmp_path, new(intermediate_size=20, fc_norm=True))
    with pytest.raises(Eagle3Error, match="do not fit this draft") as error:
        load_warm_start(new(), tmp_path, TARGET)
    assert "mlp.up_proj" in str(error.value)
    assert "fc_norm.1" in str(error.value)
    assert "lm_head" not in str(error.value)


def test_there_must_be_weights_and_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no draft to start from"):
        load_warm_start(new(), tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(Eagle3Error, match=r"found: +pytorch_model.bin\n +remedy: +convert it to model.safetensors"):
        load_warm_start(new(), tmp_path, TARGET)
    save_file(dict(new().state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(Eagle3Error, match=r"has no configuration(.|\n)*draft.json or config.json"):
        load_warm_start(new(), tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Eagle3Error, match=r"config of the draft to start from is damaged(.|\n)*config.json"):
        load_warm_start(new(), tmp_path, TARGET)


OTHER_FLAGS = {"fc_norm": False, "norm_output": False, "norm_before_residual": True, "intermediate_size": 96}


@pytest.mark.parametrize("settings", [{}, OTHER_FLAGS], ids=["defaults", "others"])
@pytest.mark.parametrize(("kind", "attention"), [("llama", "gqa"), ("deepseek", "gqa"), ("deepseek", "mla")])
def test_the_same_settings_take_over_what_they_made(
    kind: str, attention: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """From the stage's own folder and from every format of the export."""
    target = (targets.make_llama if kind == "llama" else targets.make_deepseek)(tmp_path / "target")
    layer_ids = target.aux_layer_ids if kind == "llama" else (2, 3, 4)
    draft = new_draft(target, 120, layer_ids, attention=attention, **settings)
    plain = exported(draft, target, tmp_path, speculators=attention == "gqa")
    folders = [tmp_path / "draft", plain] + [plain.with_name("speculators")] * (attention == "gqa")
    for folder in folders:
        fresh = new_draft(target, 80, layer_ids, attention=attention, **settings)
        fresh.fc.weight.data.zero_()
        load_warm_start(fresh, folder, target)
        assert torch.allclose(fresh.fc.weight, draft.fc.weight, atol=0.01)


SETTABLE: list[tuple[dict[str, Any], str]] = [
    ({"norm_output": True}, "draft.norm_output: true"),
    ({"fc_norm": True}, "draft.fc_norm: true"),
    ({"norm_before_residual": True}, "draft.norm_before_residual: true"),
    ({"intermediate_size": 96}, "draft.intermediate_size: 96"),
    ({"aux_layer_ids": (2, 3, 4)}, "hidden_states.aux_layer_ids: [2,3,4]"),
    ({"num_key_value_heads": 4}, "draft.num_key_value_heads: 4"),
]
TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "head_dim"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters"),
    ({"rope_parameters": YARN}, "rope_parameters"),
]


@pytest.mark.parametrize("form", ["ours", "plain"])
@pytest.mark.parametrize(("changes", "named"), SETTABLE + TARGETS, ids=lambda value: "-".join(value))
def test_another_meaning_of_the_same_tensors_is_refused(
    changes: dict[str, Any], named: str, form: str, tmp_path: Path
) -> None:
    """Found and expected name what differs and nothing else; the remedy is the user's settings, where they suffice."""
    old = new(**changes)
    if form == "ours":
        save_draft(old, tmp_path)
    else:
        save_plain(plain_config(old.config, TARGET), tmp_path, old)
    with pytest.raises(Eagle3Error, match="trained with other settings") as error:
        load_warm_start(new(), tmp_path, TARGET)
    _, _, found, expected, remedy = str(error.value).splitlines()
    for line in (found, expected):
        assert all(f"{name}: " in line for name in changes)
        assert line.count(": ") == 1 + len(changes) or "rope" in line
    if (changes, named) in SETTABLE:
        assert f"set {named}; or draft.warm_start: null" in remedy
    else:
        assert f"no setting of a draft for this target changes {named}:" in remedy


def test_all_that_differs_is_said_at_once(tmp_path: Path) -> None:
    save_draft(new(norm_output=True, fc_norm=True), tmp_path)
    with pytest.raises(Eagle3Error, match=r"set draft.fc_norm: true, draft.norm_output: true;"):
        load_warm_start(new(), tmp_path, TARGET)


def test_the_kind_of_attention_is_set_where_the_target_has_both(tmp_path: Path) -> None:
    gqa, mla = tmp_path / "gqa", tmp_path / "mla"
    save_draft(new(), gqa)
    save_draft(new(latent=True), mla)
    with pytest.raises(Eagle3Error, match=r"set draft.attention: \"gqa\";"):
        load_warm_start(new(latent=True), gqa, LATENT_TARGET)
    with pytest.raises(Eagle3Error, match=r"set draft.attention: \"mla\";"):
        load_warm_start(new(), mla, LATENT_TARGET)
    with pytest.raises(Eagle3Error, match="no setting of a draft for this target changes attention:"):
        load_warm_start(new(), mla, TARGET)


def test_with_a_latent_target_the_size_of_a_head_follows_from_their_number(tmp_path: Path) -> None:
    save_draft(new(num_attention_heads=8, num_key_value_heads=4, head_dim=4), tmp_path)
    remedy = "set draft.num_attention_heads: 8, draft.num_key_value_heads: 4;"
    with pytest.raises(Eagle3Error, match=remedy):
        load_warm_start(new(), tmp_path, LATENT_TARGET)


def others(config: DraftConfig, leave_out: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A config.json as other trainers write it: from ours, without some keys, and others changed."""
    kept = {key: value for key, value in plain_config(config, TARGET).items() if key not in leave_out}
    return kept | changes


IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flags are off unless given": ({}, {"leave_out": FLAGS}),
    "lengths and target's vocabulary aside": ({}, {"max_position_embeddings": 2048, "draft_vocab_size": 7}),
    "head size of the number of heads": ({}, {"leave_out": ("head_dim",)}),
    "only SGLang's ids": ({}, {"leave_out": (IDS,)}),
    "no ids are the default ones": ({"aux_layer_ids": (2, 3, 3)}, {"leave_out": (IDS, "eagle_config")}),
    "rope_theta alone": ({}, {"leave_out": ("rope_parameters", "rope_scaling")}),
    "rope_scaling, type, defaults and integers": (
        {"rope_parameters": YARN},
        {
            "leave_out": ("rope_parameters",),
            "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1.0},
        },
    ),
    "eps of LlamaConfig": ({"rms_norm_eps": 1e-6}, {"leave_out": ("rms_norm_eps",)}),
}


@pytest.mark.parametrize(("ours", "theirs"), SPELLINGS.values(), ids=SPELLINGS)
def test_other_spellings_of_the_same_are_accepted(ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    old = new(**ours)
    save_plain(others(old.config, **theirs), tmp_path, old)
    load_warm_start(new(**ours), tmp_path, TARGET)


def test_what_a_format_does_not_say_has_its_default(tmp_path: Path) -> None:
    """Not this draft's own value: flags that are left out are off, but in the speculators format one is on."""
    draft = new(fc_norm=True, norm_output=True)
    save_plain(others(draft.config, FLAGS), tmp_path / "plain", draft)
    with pytest.raises(Eagle3Error, match=r"set draft.fc_norm: false, draft.norm_output: false;"):
        load_warm_start(draft, tmp_path / "plain", TARGET)
    config = speculators_config(plain_config(draft.config, TARGET), TARGET)
    del config["norm_before_residual"]
    save_plain(config, tmp_path / "speculators", draft)
    with pytest.raises(Eagle3Error, match=r"set draft.norm_before_residual: true;"):
        load_warm_start(draft, tmp_path / "speculators", TARGET)


@pytest.mark.parametrize(
    ("target", "nested", "read"),
    [
        (TARGET, [2, 3, 4], (3, 4, 5)),
        (TARGET, [1, 2, 3], (2, 3, 4)),
        (LATENT_TARGET, [3, 4, 5], (3, 4, 5)),
        (LATENT_TARGET, [1, 2, 3], (2, 3, 4)),
    ],
)
def test_ids_of_sglang_are_taken_as_it_takes_them(
    target: Target, nested: list[int], read: tuple[int, ...], tmp_path: Path
) -> None:
    draft = new(aux_layer_ids=read)
    save_plain(others(draft.config, (IDS,), eagle_config={IDS: nested}), tmp_path, draft)
    load_warm_start(draft, tmp_path, target)
    with pytest.raises(Eagle3Error, match=r"hidden_states.aux_layer_ids"):
        load_warm_start(new(aux_layer_ids=(1, 2, 5)), tmp_path, target)
