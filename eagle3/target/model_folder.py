"""The target's model folder: find or download it, check that it can be used, and identify its exact contents."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from eagle3.config.target import TargetSettings
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import sha256
from eagle3.files.records import read_json
from eagle3.target import demo
from eagle3.target.weights import tensor_files

# Files that are hashed in full, since any byte can change the model's output.
_SMALL_FILES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
# Keys that later stages read from the config.
_REQUIRED = ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")
# Models whose logits are not just `lm_head(norm(state))`: the teacher would differ from the target.
_FOREIGN_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# Weight files up to this size are hashed in full; of larger ones, blocks spread over the file.
_WHOLE = 1 << 29
_BLOCKS, _BLOCK = 16, 1 << 16


def revision(folder: Path) -> str:
    """Return a hash that identifies a model folder, within seconds for any size.

    Covers the config and tokenizer files and weight files up to 512 MiB in full; of larger ones their name, size,
    header and 16 blocks of 64 KiB spread evenly over them.
    """
    digest = hashlib.sha256()
    small = [path for path in folder.iterdir() if path.is_file() and path.suffix in _SMALL_FILES]
    for path in sorted(small) + sorted(set(tensor_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        if size <= _WHOLE or path.suffix in _SMALL_FILES:
            digest.update(bytes.fromhex(sha256(path)))
            continue
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            for block in range(_BLOCKS):
                file.seek(max(8 + header, (size - _BLOCK) * block // (_BLOCKS - 1)))
                digest.update(file.read(_BLOCK))
    return f"sha256:{digest.hexdigest()}"


def locate(settings: TargetSettings) -> Path:
    """Return the model's folder, downloading the model if the setting is a hub id.

    Raises:
        Eagle3Error: there is no such folder, or the download failed.
    """
    local = Path(settings.model).expanduser()
    if local.is_dir():
        return local.resolve()
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", settings.model):
        return _download(settings)
    raise Eagle3Error(
        "the target was not found",
        where="target.model",
        found=settings.model,
        expected=f"`{demo.NAME}`, an existing folder, or a hub id (owner/name)",
    )


def _download(settings: TargetSettings) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
    if settings.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(snapshot_download(settings.model, revision=settings.revision, allow_patterns=patterns))
    # The hub client raises errors of its own, of its HTTP library and of the system; all mean the same here.
    except Exception as error:
        raise Eagle3Error(
            "the target is not a local folder, and downloading it from the hub failed",
            where=f"target.model: {settings.model}, revision {settings.revision or 'main'}",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="check the name, the network and HF_TOKEN, or give the path of a model folder",
        ) from error


def read_text_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return the text model's config as published, plus the ids that end a generation.

    The file's own values are kept, so that `target.json` does not change with the installed transformers; only
    keys that it leaves to the class's defaults are filled in.
    """
    if not (folder / "config.json").is_file():
        raise Eagle3Error(
            "the target has no config.json",
            where=folder,
            remedy="give the folder of a whole model, as published",
        )
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise Eagle3Error(
            "the target has no tokenizer",
            where=folder,
            expected=f"one of {', '.join(_TOKENIZERS)}",
            remedy="copy the tokenizer files of the published model into the folder",
        )
    outer = read_json(folder / "config.json")
    config = dict(outer.get("text_config") or outer)
    for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"):
        if key in outer:
            config.setdefault(key, outer[key])
    # Where a nested config and the one around it disagree, whether there is a tensor decides (`head_weights`).
    if outer.get("tie_word_embeddings", config.get("tie_word_embeddings")) != config.get("tie_word_embeddings"):
        del config["tie_word_embeddings"]
    if missing := [key for key in _REQUIRED if key not in config]:
        config.update(_defaults(folder, missing, trust_remote_code))
    if foreign := [key for key in _FOREIGN_LOGITS if config.get(key) not in (None, 1, 1.0)]:
        raise Eagle3Error(
            "the target's logits are not lm_head(norm(state)), which training relies on",
            where=folder / "config.json",
            found=", ".join(f"{key}: {config[key]}" for key in foreign),
            remedy="use another target: Llama, Qwen, DeepSeek and Kimi types work",
        )
    config["eagle3_eos_token_ids"] = _eos_token_ids(folder, config)
    return config


def _defaults(folder: Path, keys: list[str], trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    problem = None
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config().to_dict()
    except ValueError as error:
        whole, problem = {}, error
    if absent := [key for key in keys if whole.get(key) is None]:
        raise Eagle3Error(
            "the target's config.json lacks keys that are needed",
            where=folder / "config.json",
            found=problem,
            expected=", ".join(absent),
            remedy="use a causal language model with RMSNorm, such as Llama, Qwen or DeepSeek",
        )
    return {key: whole[key] for key in keys}


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    generation = folder / "generation_config.json"
    values = [
        read_json(generation).get("eos_token_id") if generation.is_file() else None,
        config.get("eos_token_id"),
    ]
    ids: list[int] = []
    for value in values:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not ids:
        raise Eagle3Error(
            "the target names no token that ends a generation",
            where=folder,
            expected="`eos_token_id` in generation_config.json or config.json",
            remedy="add the id of its end-of-turn token to generation_config.json",
        )
    return list(dict.fromkeys(ids))
