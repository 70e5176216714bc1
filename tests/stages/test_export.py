"""The exported draft: what engines read, that it loads, and that it drafts as the trained one does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config.export import ExportSettings
from eagle3.errors import Eagle3Error
from eagle3.export.formats import plain_config, sglang_layer_ids
from eagle3.export.reference_draft import load_reference_draft
from eagle3.files.records import read_json, write_json
from eagle3.stages import export
from eagle3.target.pin import Target
from eagle3.target.weights import head_weights
from tests.drafts import exported, new_draft, pinned, save_draft
from tests.engines import targets

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return targets.make_deepseek(tmp_path_factory.mktemp("deepseek"))


def test_plain_holds_the_trained_weights_in_bf16_under_the_engines_names(llama: Target, tmp_path: Path) -> None:
    draft = new_draft(llama, 120, llama.aux_layer_ids, fc_norm=True)
    plain = exported(draft, llama, tmp_path)
    assert sorted(path.name for path in plain.iterdir()) == ["config.json", "model.safetensors"]
    found = load_file(plain / "model.safetensors")
    H, heads, groups, d, inner = 128, 4, 2, 32, 256
    shapes = {
        "fc.weight": [H, 3 * H],
        "fc_norm.0.weight": [H],
        "fc_norm.1.weight": [H],
        "fc_norm.2.weight": [H],
        "layers.0.input_layernorm.weight": [H],
        "layers.0.hidden_norm.weight": [H],
        "layers.0.self_attn.q_proj.weight": [heads * d, 2 * H],
        "layers.0.self_attn.k_proj.weight": [groups * d, 2 * H],
        "layers.0.self_attn.v_proj.weight": [groups * d, 2 * H],
        "layers.0.self_attn.o_proj.weight": [H, heads * d],
        "layers.0.post_attention_layernorm.weight": [H],
        "layers.0.mlp.gate_proj.weight": [inner, H],
        "layers.0.mlp.up_proj.weight": [inner, H],
        "layers.0.mlp.down_proj.weight": [H, inner],
        "norm.weight": [H],
        "lm_head.weight": [120, H],
        "d2t": [120],
        "t2d": [llama.vocab_size],
    }
    assert {name: list(tensor.shape) for name, tensor in found.items()} == shapes
    for name, tensor in draft.state_dict().items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)


def test_config_comes_from_the_targets_own(llama: Target, tmp_path: Path) -> None:
    """Layer ids of both conventions, lengths, rope in both forms."""
    config = read_json(exported(new_draft(llama, 120, llama.aux_layer_ids), llama, tmp_path) / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["max_position_embeddings"] == llama.config["max_position_embeddings"]
    assert config["rms_norm_eps"] == llama.config["rms_norm_eps"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (llama.vocab_size, 120)
    assert config["eos_token_id"] == llama.config["eos_token_id"]
    assert config["tie_word_embeddings"] is False
    assert (config["norm_before_residual"], config["fc_norm"], config["norm_output"]) == (False, True, True)
    assert config["num_aux_hidden_states"] == 3


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("ids", [(2, 3), (3,), (1,)], ids=str)
def test_fewer_auxiliary_layers_are_told_to_the_engines(
    deepseek: Target, tmp_path: Path, attention: str, ids: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang leaves out `fc` for one state: it gets no ids then, so that it fails instead of drafting wrongly."""
    plain = exported(new_draft(deepseek, 120, ids, attention=attention), deepseek, tmp_path)
    config = read_json(plain / "config.json")
    assert config["num_aux_hidden_states"] == len(ids)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(ids)
    shapes = {name: list(tensor.shape) for name, tensor in load_file(plain / "model.safetensors").items()}
    assert shapes["fc.weight"] == [128, len(ids) * 128]
    assert sum(name.startswith("fc_norm") for name in shapes) == len(ids)
    nested = {} if len(ids) == 1 else {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    assert config["eagle_config"] == {"use_aux_hidden_state": True} | nested
    assert ("SGLang cannot" in capsys.readouterr().err) == (len(ids) == 1)


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_yarn_is_the_targets_in_both_forms(deepseek: Target, attention: str) -> None:
    target = replace(deepseek, config=deepseek.config | {"rope_parameters": YARN, "max_position_embeddings": 262144})
    draft = new_draft(target, 120, (2, 3, 4), attention=attention)
    config = plain_config(draft.config, target)
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"] | {"rope_theta": 50000.0} == config["rope_parameters"]
    assert config["rope_scaling"]["factor"] == 64.0
    assert config["rope_scaling"]["rope_type"] == "yarn"
    assert ("mscale_all_dim" in config["rope_scaling"]) == (attention == "mla")
    assert config["max_position_embeddings"] == 262144


FLAGS = [{}, {"fc_norm": False}, {"norm_output": False}, {"norm_before_residual": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags), "none"))
@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("rope", [None, YARN], ids=["rope", "yarn"])
def test_every_kind_of_draft_is_read_back_alike(
    deepseek: Target, tmp_path: Path, attention: str, flags: dict[str, bool], rope: dict[str, Any] | None
) -> None:
    """The stage compares the reference model with the training forward; here its limit is drawn much tighter."""
    if rope:
        folder = shutil.copytree(deepseek.path, tmp_path / "target")
        values = read_json(folder / "config.json") | {"rope_parameters": rope, "max_position_embeddings": 262144}
        write_json(folder / "config.json", values)
        deepseek = replace(deepseek, path=folder, config=deepseek.config | values)
    draft = new_draft(deepseek, 120, (2, 3, 4), attention=attention, **flags)
    weights = save_draft(draft, tmp_path / "draft")
    output = tmp_path / "export"
    output.mkdir()
    pin = pinned(deepseek, tmp_path / "pin")
    counts = export.make(ExportSettings(), target=pin, draft=weights, folder=output)
    assert counts["largest_deviation_from_training"] < 1e-5
    assert counts["tensors"] == len(load_file(output / "plain" / "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"norm_output": False},
        {"norm_before_residual": True},
        {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16},
        {"rms_norm_eps": 1e-1},
    ],
    ids=["theta", "norm_output", "norm_before_residual", "heads", "eps"],
)
def test_a_config_that_means_another_network_is_noticed(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """All of these load without an error; only the numbers differ."""
    true_config = plain_config

    def wrong_config(*arguments: Any) -> dict[str, Any]:
        return true_config(*arguments) | change

    monkeypatch.setattr(export, "plain_config", wrong_config)
    with pytest.raises(Eagle3Error, match="outputs differ from training"):
        exported(new_draft(llama, 120, llama.aux_layer_ids), llama, tmp_path)


def test_mla_drafts_have_the_architecture_that_engines_know(deepseek: Target, tmp_path: Path) -> None:
    plain = exported(new_draft(deepseek, 120, (2, 3, 4), attention="mla"), deepseek, tmp_path)
    config = read_json(plain / "config.json")
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config["model_type"] == "kimi_k2"
    assert "head_dim" not in config
    latent = {
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert latent.items() <= config.items()
    found = load_file(plain / "model.safetensors")
    assert found["layers.0.self_attn.q_a_proj.weight"].shape == (64, 256)
    assert found["layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 256)


def test_a_whole_vocabulary_has_no_map(llama: Target, tmp_path: Path) -> None:
    """A map where both vocabularies are the same is refused by vLLM."""
    plain = exported(new_draft(llama, llama.vocab_size, llama.aux_layer_ids), llama, tmp_path)
    assert not {"d2t", "t2d"} & load_file(plain / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("latent", "ids", "written"),
    [
        (False, (2, 4, 5), [1, 3, 4]),
        (False, (1, 4, 5), [0, 3, 4]),
        (True, (2, 30, 58), [1, 29, 57]),
        (True, (3, 30, 58), [3, 30, 58]),
    ],
)
def test_nested_layer_ids_mean_the_same_taps(
    latent: bool, ids: tuple[int, ...], written: list[int], llama: Target
) -> None:
    """SGLang adds 1 to each, but in DeepSeek-type models only if the first is 1."""
    target = replace(llama, config=llama.config | ({"kv_lora_rank": 512} if latent else {}))
    assert sglang_layer_ids(ids, target) == written
    added = 1 if not latent or written[0] == 1 else 0
    assert tuple(layer + added for layer in written) == ids


def test_taps_that_cannot_be_written_are_refused(deepseek: Target) -> None:
    with pytest.raises(Eagle3Error, match="input of layer 1"):
        sglang_layer_ids((1, 2, 3), deepseek)


def test_speculators_format(llama: Target, tmp_path: Path) -> None:
    """What vLLM's reader of the format looks at; `norm_before_residual` must be there, for its default is true."""
    plain = exported(new_draft(llama, 120, llama.aux_layer_ids), llama, tmp_path, speculators=True)
    folder = plain.parent / "speculators"
    config = read_json(folder / "config.json")
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 120
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    method = config["speculators_config"]
    assert method["algorithm"] == "eagle3"
    assert method["proposal_methods"][0]["proposal_type"] == method["default_proposal_method"] == "greedy"
    assert method["verifier"] == {"name_or_path": str(llama.path.resolve()), "architectures": ["LlamaForCausalLM"]}
    assert (folder / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_speculators_format_does_not_support_mla(deepseek: Target, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="does not support MLA drafts"):
        exported(new_draft(deepseek, 120, (2, 3, 4), attention="mla"), deepseek, tmp_path, speculators=True)


def leave_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.0.hidden_norm.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.hidden_norm.weight"] = torch.zeros(4)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "name"),
    [(leave_out, "layers.0.hidden_norm.weight missing"), (add, "layers.1.hidden_norm"), (reshape, "fc.weight")],
)
def test_loading_counts_unmatched_tensors_in_both_directions(
    llama: Target, tmp_path: Path, damage: Any, name: str
) -> None:
    plain = exported(new_draft(llama, 120, llama.aux_layer_ids), llama, tmp_path)
    tensors = load_file(plain / "model.safetensors")
    damage(tensors)
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(Eagle3Error, match="1 tensors do not match") as error:
        load_reference_draft(plain, head_weights(llama).embedding)
    assert name in str(error.value)


def test_the_same_draft_gives_the_same_bytes(llama: Target, tmp_path: Path) -> None:
    one, two = (exported(new_draft(llama, 120, (2, 4, 5)), llama, tmp_path / name) for name in "ab")
    for name in ("config.json", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
