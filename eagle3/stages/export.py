"""Export: the draft model in the formats that vLLM and SGLang load, checked against the trained one.

In: a trained draft model. Out: `plain/` and `speculators/`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.config.export import ExportSettings
from eagle3.console import say
from eagle3.errors import Eagle3Error
from eagle3.export.formats import plain_config, speculators_config
from eagle3.files.atomic import atomic_write
from eagle3.files.records import write_json
from eagle3.target.pin import Target, load_target
from eagle3.target.weights import head_weights

if TYPE_CHECKING:
    import torch

    from eagle3.draft.model.network import Draft
    from eagle3.export.reference_draft import ReferenceDraft

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# The numeric check: tokens of context, steps of the chain, and the largest relative error.
_CONTEXT, _STEPS, _TOLERANCE = 12, 4, 1e-3


def make(settings: ExportSettings, *, target: Path, draft: Path, folder: Path) -> dict[str, Any]:
    """Write `plain/` and, if configured, `speculators/`: `config.json` and `model.safetensors` (bf16).

    The export is loaded again by our reference model, which reads nothing else: every tensor must be used, every
    parameter filled, and a chain of draft tokens must match training.

    Args:
        settings: formats.
        target: `target.json`.
        draft: `model.safetensors` of the trained draft, its `draft.json` next to it.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: the draft is damaged, the export does not load, or its outputs differ from training.
    """
    from eagle3.draft.model.network import load_draft

    pinned = load_target(target)
    trained = load_draft(draft.parent)
    if settings.speculators and trained.config.attention != "gqa":
        raise Eagle3Error(
            "the speculators format does not support MLA drafts",
            where="export.speculators",
            remedy="set it to false: vLLM and SGLang load the plain format",
        )
    if len(trained.config.aux_layer_ids) == 1:
        say("vLLM can serve a draft that reads one auxiliary layer; SGLang cannot, and fails at start-up")
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
        "largest_deviation_from_training": error,
        "layers_read": list(trained.config.aux_layer_ids),
        "draft_vocabulary": trained.config.draft_vocab_size,
    }


def _write_weights(draft: Draft, path: Path) -> int:
    """Write the tensors in bf16, the vocabulary maps only if the draft vocabulary is reduced; return their number."""
    import torch
    from safetensors.torch import save_file

    whole = draft.config.draft_vocab_size == draft.config.vocab_size
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
        if not (whole and name in ("d2t", "t2d"))
    }
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return len(tensors)


def _check(trained: Draft, target: Target, plain: Path) -> float:
    """Load the export and compare a chain of draft tokens with the training forward; return the relative error."""
    import torch

    from eagle3.export.reference_draft import load_reference_draft

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
            "the exported draft's outputs differ from training",
            where=plain,
            found=f"relative error {error:.2g} over {_STEPS} steps",
            expected=f"at most {_TOLERANCE}",
            remedy="report this: export and training disagree about the network",
        )
    return error


def _trained_chain(draft: Draft, embedding: torch.Tensor, tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Return what lm_head reads in each step [steps, H], from the training forward with the exported rounding."""
    import torch

    from eagle3.draft.data.row import build_row
    from eagle3.draft.unroll.unroll import unroll
    from eagle3.draft.unroll.weights import prepare
    from eagle3.hidden_states.reader import HiddenStateSample

    teacher = torch.zeros(_STEPS, aux.shape[-1])
    rows = torch.arange(_CONTEXT, _CONTEXT + _STEPS)
    states = HiddenStateSample(id="check", token_ids=tokens.int(), aux=aux, last=teacher, last_rows=rows)
    row = build_row([(states, [(_CONTEXT, len(tokens))])], _STEPS)
    for parameter in draft.parameters():
        parameter.data = parameter.to(torch.bfloat16).float()
    hidden = unroll(prepare(draft, torch.float32), row, embedding)
    # Only the first root is alive in all steps; the longest-lived root comes first.
    return torch.stack([output[0] for output in hidden.split(row.alive)])


def _exported_chain(draft: ReferenceDraft, tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Return the same from the reference model: a context with true states, then step by step on its own features."""
    import torch

    from eagle3.export.position_cache import PositionCache

    cache = PositionCache()
    features = draft.combine(aux[None, :_CONTEXT].flatten(2))
    hidden, features = draft(tokens[None, 1 : _CONTEXT + 1], features, torch.arange(_CONTEXT)[None], cache)
    outputs = [hidden[0, -1]]
    for position in range(_CONTEXT, _CONTEXT + _STEPS - 1):
        token = tokens[None, position + 1 : position + 2]
        hidden, features = draft(token, features[:, -1:], torch.tensor([[position]]), cache)
        outputs.append(hidden[0, -1])
    return torch.stack(outputs)
