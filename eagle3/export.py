"""Export: the draft in the formats that vLLM and SGLang load, checked against the draft that was trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.console import say
from eagle3.errors import Eagle3Error
from eagle3.files.records import write_json
from eagle3.settings import Settings
from eagle3.target import Target, head_weights, load_target

if TYPE_CHECKING:
    import torch

    from eagle3.acceptance.reference_draft import ReferenceDraft
    from eagle3.draft.config import DraftConfig
    from eagle3.draft.model import Draft

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Drafts per step that the speculators format suggests to the server; a flag of the server overrides it.
_SUGGESTED_DRAFTS = 3
# The numeric check: tokens of context, and steps of the chain.
_CONTEXT, _STEPS, _TOLERANCE = 12, 4, 1e-3


class ExportSettings(Settings):
    """Formats to write."""

    speculators: bool = False
    """Also write the speculators format, for `vllm serve <draft>` in one step (Llama-type drafts only)."""


def make(settings: ExportSettings, *, target: Path, draft: Path, folder: Path) -> dict[str, Any]:
    """Write `plain/` and, if asked for, `speculators/`: `config.json` and `model.safetensors` (bf16).

    What was written is loaded again by our reference model, which reads nothing else: every tensor must be used,
    every parameter filled, and a chain of drafts must come out as in training.

    Args:
        settings: formats.
        target: `target.json`.
        draft: `model.safetensors` of the trained draft, its `draft.json` beside it.
        folder: where to work.

    Raises:
        Eagle3Error: the draft is damaged, the export does not load, or it does not draft alike.
    """
    from eagle3.draft.model import load_draft

    pinned = load_target(target)
    trained = load_draft(draft.parent)
    if settings.speculators and trained.config.attention != "gqa":
        raise Eagle3Error(
            "the speculators format knows no MLA drafts",
            where="export.speculators",
            remedy="set it to false: the plain format serves in vLLM and SGLang",
        )
    if len(trained.config.aux_layer_ids) == 1:
        say("a draft that reads one auxiliary layer serves in vLLM; SGLang cannot serve it, and fails when it starts")
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    config = plain_config(trained.config, pinned)
    write_json(plain / CONFIG, config)
    tensors = _write_weights(trained, plain / WEIGHTS)
    error = _check(trained, pinned, plain)
    if settings.speculators:
        speculators = folder / "speculators"
        speculators.mkdir(exist_ok=True)
        write_json(speculators / CONFIG, speculators_config(config, pinned))
        shutil.copyfile(plain / WEIGHTS, speculators / WEIGHTS)
    return {
        "architecture": config["architectures"][0],
        "tensors": tensors,
        "unmatched tensors": 0,
        "largest deviation from training": error,
        "layers read": list(trained.config.aux_layer_ids),
        "draft vocabulary": trained.config.draft_vocab_size,
    }


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
        # SGLang tells by the width whether states still have to pass `fc`: one state would be left as it is, and the
        # draft be wrong without a word. Without ids it taps its three default layers, which no `fc` for one takes.
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = sglang_layer_ids(draft.aux_layer_ids, target)
    if draft.latent:
        # `deepseek_v3` would be taken for a multi-token-prediction draft; the head size is one part of the latent's.
        del config["head_dim"]
        config |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            **draft.latent.model_dump(),
        }
    return config


def sglang_layer_ids(layer_ids: tuple[int, ...], target: Target) -> list[int]:
    """Return the ids that make SGLang tap the inputs of these layers.

    SGLang names a tap by the layer whose *output* it is: one less. Its DeepSeek-type models take ids as they are
    unless the first is 1, so that a first tap of 2 must be written as 1, and any other as it is.

    Raises:
        Eagle3Error: such a target's taps begin at layer 1, which cannot be written.
    """
    as_outputs = [layer_id - 1 for layer_id in layer_ids]
    if "kv_lora_rank" not in target.config or layer_ids[0] == 2:
        return as_outputs
    if layer_ids[0] == 1:
        raise Eagle3Error(
            "SGLang cannot be told to tap the input of layer 1 of this target",
            where="hidden_states.aux_layer_ids",
            found=list(layer_ids),
            remedy="begin with another layer, such as the default 2",
        )
    return list(layer_ids)


def speculators_config(plain: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the speculators form of a plain config: the layer apart from what makes it a draft of this target."""
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
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SUGGESTED_DRAFTS}],
            "verifier": {
                "name_or_path": str(target.path),
                "architectures": target.config.get("architectures", []),
            },
        },
    }


def _write_weights(draft: Draft, path: Path) -> int:
    """Write the tensors in bf16, and the vocabulary's maps unless the draft has the whole vocabulary."""
    import torch
    from safetensors.torch import save_file

    whole = draft.config.draft_vocab_size == draft.config.vocab_size
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
        if not (whole and name in ("d2t", "t2d"))
    }
    temporary = path.with_name(f".{path.name}")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(path)
    return len(tensors)


def _check(trained: Draft, target: Target, plain: Path) -> float:
    """Load the export and compare a chain of drafts with the training forward; return the largest relative error."""
    import torch

    from eagle3.acceptance.reference_draft import load_reference_draft

    embedding = head_weights(target).embedding
    exported = load_reference_draft(plain, embedding)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(embedding), (_CONTEXT + _STEPS + 1,), generator=generator)
    aux = torch.randn(len(tokens) - 2, len(trained.config.aux_layer_ids), target.hidden_size, generator=generator)
    with torch.inference_mode():
        expected = _trained_chain(trained, embedding, tokens, aux)
        found = _exported_chain(exported, tokens, aux)
    error = float((found - expected).norm() / expected.norm())
    if not error <= _TOLERANCE:
        raise Eagle3Error(
            "the exported draft does not draft as the trained one does",
            where=plain,
            found=f"relative error {error:.2g} over {_STEPS} steps",
            expected=f"at most {_TOLERANCE}",
            remedy="report this: the export and the training disagree about the network",
        )
    return error


def _trained_chain(draft: Draft, embedding: torch.Tensor, tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Return what lm_head reads in each step [steps, H], by the training forward with the exported rounding."""
    import torch

    from eagle3.draft.rows import build_row
    from eagle3.draft.unroll import prepare, unroll
    from eagle3.hidden_states.reader import HiddenStateSample

    teacher = torch.zeros(_STEPS, aux.shape[-1])
    rows = torch.arange(_CONTEXT, _CONTEXT + _STEPS)
    states = HiddenStateSample(id="check", token_ids=tokens.int(), aux=aux, last=teacher, last_rows=rows)
    row = build_row([(states, [(_CONTEXT, len(tokens))])], _STEPS)
    for parameter in draft.parameters():
        parameter.data = parameter.to(torch.bfloat16).float()
    hidden = unroll(prepare(draft, torch.float32), row, embedding)
    # The first root is the only one that lives through all steps; the longest-lived comes first.
    return torch.stack([output[0] for output in hidden.split(row.alive)])


def _exported_chain(draft: ReferenceDraft, tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Return the same by the reference model: a context with true states, then step by step on its own features."""
    import torch

    from eagle3.position_cache import PositionCache

    cache = PositionCache()
    features = draft.combine(aux[None, :_CONTEXT].flatten(2))
    hidden, features = draft(tokens[None, 1 : _CONTEXT + 1], features, torch.arange(_CONTEXT)[None], cache)
    outputs = [hidden[0, -1]]
    for position in range(_CONTEXT, _CONTEXT + _STEPS - 1):
        token = tokens[None, position + 1 : position + 2]
        hidden, features = draft(token, features[:, -1:], torch.tensor([[position]]), cache)
        outputs.append(hidden[0, -1])
    return torch.stack(outputs)
