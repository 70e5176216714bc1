"""Checks that an earlier draft model's configuration matches that of the draft model that takes its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from eagle3.config.draft import config_file
from eagle3.draft.model.config import NAME, DraftConfig, LatentShape, read_draft_config, rope_values
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

_PLAIN = "config.json"

# Weights fit only the values they were trained with. Vocabularies may differ, and lengths unless the rope depends on
# them.
_COMPARED = (
    "attention",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "aux_layer_ids",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
)
_COMPARED_BY_ATTENTION = {"gqa": ("num_key_value_heads", "head_dim"), "mla": tuple(LatentShape.model_fields)}
# Set by the user; everything else comes from the target.
_DRAFT_SETTINGS = (
    "attention",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
)
_SETTINGS = {name: f"draft.{name}" for name in _DRAFT_SETTINGS} | {"aux_layer_ids": "hidden_states.aux_layer_ids"}
# Rope type -> the parameters that it reads.
_ROPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def check_config(folder: Path, draft: DraftConfig, target: Target) -> None:
    """Compare an earlier draft's configuration, as far as it goes, with that of the draft that takes its weights.

    Raises:
        Eagle3Error: the configuration is missing, damaged or different; names every setting that differs.
    """
    path = config_file(folder)
    if path is None:
        raise Eagle3Error(
            "the draft to start from has no configuration, so the meaning of its weights is unknown",
            where=folder,
            expected=f"{NAME} or {_PLAIN}",
            remedy=f"put the {NAME} or {_PLAIN} that belongs to the weights next to them, or set draft.warm_start "
            "to null",
        )
    found = _compared(read_draft_config(folder).model_dump() if path.name == NAME else _plain_values(path, target))
    expected = _compared(draft.model_dump())
    differing = [name for name in expected if name in found and found[name] != expected[name]]
    if differing:
        raise Eagle3Error(
            "the draft to start from was trained with other settings",
            where=path,
            found=", ".join(f"{name}: {_json(found[name])}" for name in differing),
            expected=", ".join(f"{name}: {_json(expected[name])}" for name in differing),
            remedy=_remedy(differing, found, target),
        )


def _remedy(differing: list[str], found: dict[str, Any], target: Target) -> str:
    latent_target = "kv_lora_rank" in target.config
    fixed = [name for name in differing if name not in _SETTINGS]
    if latent_target and found.get("head_dim", 0) * found.get("num_attention_heads", 0) == target.hidden_size:
        # For such targets the head size follows from the number of heads.
        fixed = [name for name in fixed if name != "head_dim"]
    if found["attention"] == "mla" and not latent_target:
        fixed.append("attention")
    if fixed:
        return (
            f"no setting of a draft for this target changes {', '.join(fixed)}: give an earlier draft of this target, "
            "or set draft.warm_start to null"
        )
    settings = [f"{_SETTINGS[name]}: {_json(found[name])}" for name in differing if name in _SETTINGS]
    return f"set {', '.join(settings)}; or draft.warm_start: null"


def _compared(values: dict[str, Any]) -> dict[str, Any]:
    """Return the compared values of a DraftConfig in one form; values that are not given are left out."""
    values = values | (values["latent"] or {})
    rope = {key: value for key, value in values["rope_parameters"].items() if value is not None}
    if rope["rope_type"] == "yarn":
        rope = _YARN_DEFAULTS | {"original_max_position_embeddings": values.get("max_position_embeddings")} | rope
    read = {"rope_type", "rope_theta", *_ROPE.get(rope["rope_type"], rope)}
    values["rope_parameters"] = {key: value for key, value in rope.items() if key in read}
    values["aux_layer_ids"] = sorted(values["aux_layer_ids"])
    return {name: values[name] for name in _COMPARED + _COMPARED_BY_ATTENTION[values["attention"]] if name in values}


def _plain_values(path: Path, target: Target) -> dict[str, Any]:
    """Return what a config.json of vLLM, SGLang or speculators says, under the names of a DraftConfig.

    What it leaves out has the default of the format, or, for the layer, that of transformers' LlamaConfig.
    """
    try:
        config = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise Eagle3Error(
            "the config of the draft to start from is damaged",
            where=path,
            found=error,
            remedy="copy the earlier draft again",
        ) from None
    if "transformer_layer_config" in config:
        # Speculators keeps the layer's config apart and has the opposite default here.
        config = {"norm_before_residual": True} | config["transformer_layer_config"] | config
    heads = config.get("num_attention_heads")
    head_dim = config["hidden_size"] // heads if heads and config.get("hidden_size") else None
    latent = {key: config.get(key) for key in LatentShape.model_fields} if config.get("kv_lora_rank") else None
    values = {
        **{key: config.get(key) for key in (*_COMPARED, "max_position_embeddings")},
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or head_dim,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        **{key: bool(config.get(key)) for key in ("fc_norm", "norm_output", "norm_before_residual")},
    }
    return {key: value for key, value in values.items() if value is not None} | {
        "attention": "mla" if latent else "gqa",
        "latent": latent and {key: value for key, value in latent.items() if value is not None},
        "rope_parameters": rope_values(config),
        "aux_layer_ids": _aux_layer_ids(config, target),
    }


def _aux_layer_ids(config: dict[str, Any], target: Target) -> list[int]:
    """Return the layers whose input is read. SGLang's ids, under `eagle_config`, name the layers whose output that is,
    except for DeepSeek-type targets unless the first is 1 (see `eagle3.export.formats.sglang_layer_ids`).
    """
    own = config.get("eagle_aux_hidden_state_layer_ids")
    if own:
        return list(own)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not nested:
        return list(target.aux_layer_ids)
    as_inputs = "kv_lora_rank" in target.config and nested[0] != 1
    return list(nested) if as_inputs else [layer_id + 1 for layer_id in nested]


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
