"""The configs of the formats in which vLLM and SGLang load a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

if TYPE_CHECKING:
    from eagle3.draft.model.config import DraftConfig

# Draft tokens per step that the speculators format suggests to the server; a server flag overrides it.
_SUGGESTED_DRAFT_TOKENS = 3


def plain_config(draft: DraftConfig, target: Target) -> dict[str, Any]:
    """Return the config.json that vLLM and SGLang read, from the draft's and the target's configs alone."""
    ids: dict[str, Any] = {
        key: target.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target.config
    }
    rope = draft.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": draft.hidden_act,
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_position_embeddings,
        # Engines and their versions differ in which form they read.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": draft.vocab_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **ids,
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(draft.aux_layer_ids),
        "norm_before_residual": draft.norm_before_residual,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(draft.aux_layer_ids),
        "eagle_config": {"use_aux_hidden_state": True},
    }
    if len(draft.aux_layer_ids) > 1:
        # SGLang decides by the width whether states still have to go through `fc`: a single state would be used as it
        # is, and the draft would be silently wrong. Without ids it taps its three default layers, which do not fit an
        # `fc` for one, so it fails.
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = sglang_layer_ids(draft.aux_layer_ids, target)
    if draft.latent:
        # `deepseek_v3` would be read as a multi-token-prediction draft; the head size follows from the latent sizes.
        del config["head_dim"]
        config |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            **draft.latent.model_dump(),
        }
    return config


def sglang_layer_ids(layer_ids: tuple[int, ...], target: Target) -> list[int]:
    """Return the ids that make SGLang tap the inputs of these layers.

    SGLang names a tap by the layer whose *output* it is: one less. Its DeepSeek-type models read the ids as inputs
    unless the first is 1, so a first tap of 2 must be written as 1, and any other unchanged.

    Raises:
        Eagle3Error: a DeepSeek-type target is tapped at layer 1, which cannot be written.
    """
    as_outputs = [layer_id - 1 for layer_id in layer_ids]
    if "kv_lora_rank" not in target.config or layer_ids[0] == 2:
        return as_outputs
    if layer_ids[0] == 1:
        raise Eagle3Error(
            "SGLang cannot be told to tap the input of layer 1 of this target",
            where="hidden_states.aux_layer_ids",
            found=list(layer_ids),
            remedy="start with another layer, such as the default 2",
        )
    return list(layer_ids)


def speculators_config(plain: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the speculators form of a plain config: the layer's config apart from that of the speculator."""
    own = {
        "draft_vocab_size",
        "norm_before_residual",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
        "eagle_aux_hidden_state_layer_ids",
    }
    layer = {key: value for key, value in plain.items() if key not in own and key != "eagle_config"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "tie_word_embeddings": False,
        **{key: plain[key] for key in sorted(own)},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SUGGESTED_DRAFT_TOKENS}],
            "verifier": {
                "name_or_path": str(target.path),
                "architectures": target.config.get("architectures", []),
            },
        },
    }
