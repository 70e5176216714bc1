"""The draft model's config, `draft.json`: the network, its export and its measurement are built from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.config.draft import DraftSettings
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

NAME, WEIGHTS = "draft.json", "model.safetensors"
HEAD = "lm_head.weight"

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# vLLM's and transformers' yarn for Llama-type layers reads these keys, SGLang's does not: without them all three agree.
_MLA_ROPE_KEYS = frozenset({"mscale", "mscale_all_dim"})


class LatentShape(BaseModel):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class DraftConfig(BaseModel):
    """Everything except the weights that the draft model's forward pass depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attention: Literal["gqa", "mla"]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    latent: LatentShape | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    """As in the target's config: `rope_type`, `rope_theta` and what the type needs."""
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Layers whose input is read, ascending (vLLM's convention)."""
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool


def draft_config(
    settings: DraftSettings, target: Target, draft_vocab_size: int, aux_layer_ids: tuple[int, ...]
) -> DraftConfig:
    """Derive the draft's config from the target's: eps, rope and lengths are never set by hand.

    Raises:
        Eagle3Error: the target does not have this attention, or has a rope type that drafts do not support.
    """
    config = target.config
    heads = settings.num_attention_heads or int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or target.hidden_size // int(config["num_attention_heads"]))
    if settings.attention == "gqa" and "kv_lora_rank" in config:
        # In MLA targets this field is the size of one part of a head.
        head_dim = target.hidden_size // heads
    latent = _latent_shape(target) if settings.attention == "mla" else None
    return DraftConfig(
        attention=settings.attention,
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or int(config["intermediate_size"]),
        num_attention_heads=heads,
        # Latent attention has one key-value head per query head.
        num_key_value_heads=heads
        if latent
        else settings.num_key_value_heads or int(config.get("num_key_value_heads") or heads),
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else head_dim,
        latent=latent,
        rms_norm_eps=float(config["rms_norm_eps"]),
        max_position_embeddings=int(config["max_position_embeddings"]),
        rope_parameters=_rope_parameters(target, settings.attention),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=aux_layer_ids,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_residual=settings.norm_before_residual,
    )


def read_draft_config(folder: Path) -> DraftConfig:
    """Read `draft.json`.

    Raises:
        Eagle3Error: it is missing or not valid.
    """
    path = folder / NAME
    try:
        return DraftConfig.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise Eagle3Error("draft.json is missing", where=path, remedy="run the stage `draft`") from None
    except ValidationError as error:
        raise Eagle3Error(
            "a draft's config is damaged",
            where=path,
            found=error,
            remedy="delete it and run snakemake again",
        ) from None


def _latent_shape(target: Target) -> LatentShape:
    missing = [key for key in LatentShape.model_fields if not target.config.get(key)]
    if missing:
        raise Eagle3Error(
            "an MLA draft needs a target with multi-head latent attention",
            where=f"{target.path / 'config.json'}, keys {', '.join(missing)}",
            remedy="set draft.attention to gqa",
        )
    return LatentShape(**{key: int(target.config[key]) for key in LatentShape.model_fields})


def rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters of a config.json in transformers' current form, from either form."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    values.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    values["rope_type"] = values.pop("type", None) or values.get("rope_type") or "default"
    # Multimodal rope gives sections of a head their own positions; in text these are equal, and it is ordinary rope.
    for key in ("mrope_section", "mrope_interleaved"):
        values.pop(key, None)
    if values["rope_type"] == "mrope":
        values["rope_type"] = "default"
    return values


def _rope_parameters(target: Target, attention: str) -> dict[str, Any]:
    """Return the target's rope parameters as they apply to a draft's heads."""
    values = rope_values(target.config)
    # Rope covers all of a draft's heads, even where the target rotates only a part of its own.
    values.pop("partial_rotary_factor", None)
    if values["rope_type"] not in ROPE_TYPES:
        raise Eagle3Error(
            "the target's rope type is not supported in drafts",
            where=target.path / "config.json",
            found=values["rope_type"],
            expected=f"one of {', '.join(ROPE_TYPES)}",
        )
    if nested := {key: value for key, value in values.items() if isinstance(value, list | dict)}:
        raise Eagle3Error(
            "the target's rope differs between layers or dimensions, which drafts do not support",
            where=f"{target.path / 'config.json'}, rope parameters",
            found=nested,
            expected="single values",
        )
    if attention == "gqa":
        values = {key: value for key, value in values.items() if key not in _MLA_ROPE_KEYS}
    return values
