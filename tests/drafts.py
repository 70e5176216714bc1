"""Drafts for the tests of export, serving and the embedded engine: made by hand, in real formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.config.draft import DraftSettings
from eagle3.config.export import ExportSettings
from eagle3.config.target import TargetSettings
from eagle3.draft.model.config import NAME, WEIGHTS, draft_config
from eagle3.draft.model.network import Draft
from eagle3.files.records import write_json
from eagle3.stages import export
from eagle3.stages.target import PIN, make
from eagle3.target.pin import Target
from eagle3.target.weights import head_weights


def pinned(target: Target, folder: Path) -> Path:
    """Pin a target's folder as the stage does; return its target.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make(TargetSettings(model=str(target.path)), folder=folder)
    return folder / PIN


def new_draft(target: Target, vocabulary: int, layer_ids: tuple[int, ...], **settings: Any) -> Draft:
    """Return a draft whose every weight is random; its vocabulary is spread over the target's."""
    config = draft_config(DraftSettings(**settings), target, vocabulary, layer_ids)
    ids = torch.linspace(0, target.vocab_size - 1, vocabulary).long()
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft = Draft(config, ids - torch.arange(vocabulary), t2d)
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        matrix = parameter.dim() > 1
        scale = parameter.shape[-1] ** -0.5 if matrix else 0.2
        parameter.data = (0.0 if matrix else 1.0) + scale * torch.randn(parameter.shape, generator=generator)
    return draft


def save_draft(draft: Draft, folder: Path) -> Path:
    """Write a draft artifact; return its model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, folder / WEIGHTS)
    write_json(folder / NAME, draft.config.model_dump())
    return folder / WEIGHTS


def exported(draft: Draft, target: Target, folder: Path, **settings: Any) -> Path:
    """Export a draft as the stage does; return the folder `plain`."""
    output = folder / "export"
    output.mkdir(parents=True)
    weights = save_draft(draft, folder / "draft")
    export.make(ExportSettings(**settings), target=pinned(target, folder / "pin"), draft=weights, folder=output)
    return output / "plain"


def perfect_draft(target: Target) -> Draft:
    """Return a draft that knows a scripted target, in which every token has one successor.

    Its feature is the embedding of the last token that it knows of: `fc` takes the first of three equal states, and
    the MLP, one unit per token, turns a token's embedding into its successor's. Attention adds nothing.
    """
    head = head_weights(target)
    embedding, lm_head = head.embedding.float(), head.lm_head.float()
    V, H = embedding.shape
    successor = (lm_head @ embedding.T).argmax(0)
    draft = new_draft(target, V - 1, (0, 1, 2), intermediate_size=V, fc_norm=False, norm_output=False)
    # One token that never comes is left out, so that the map from draft ids to target ids is not the identity.
    left_out = int((lm_head.norm(dim=1) == 0).nonzero()[0])
    kept = [token for token in range(V) if token != left_out]
    draft.d2t.copy_(torch.tensor(kept) - torch.arange(V - 1))
    draft.t2d.fill_(True)[left_out] = False
    layer: Any = draft.layers[0]
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        draft.fc.weight[:, :H] = torch.eye(H)
        layer.mlp.gate_proj.weight.copy_(embedding)
        layer.mlp.up_proj.weight.copy_(embedding)
        # A normed embedding has length sqrt(H), so the token's unit gives silu(sqrt(H)) * sqrt(H), nearly H.
        layer.mlp.down_proj.weight.copy_((embedding[successor] - embedding).T / H)
        draft.lm_head.weight.copy_(lm_head[kept])
    return draft
