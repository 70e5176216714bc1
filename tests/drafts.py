"""Drafts for the tests of export, serving and the embedded engine: made by hand, in real formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.draft.config import NAME, draft_config
from eagle3.draft.model import WEIGHTS, Draft
from eagle3.draft.settings import DraftSettings
from eagle3.pin import PIN, make
from eagle3.records import write_json
from eagle3.target import Target, TargetSettings


def pinned(target: Target, folder: Path) -> Path:
    """Pin a target's folder as the stage does; return its target.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make(TargetSettings(model=str(target.path)), folder)
    return folder / PIN


def new_draft(target: Target, vocabulary: int, layer_ids: tuple[int, ...], **settings: Any) -> Draft:
    """Return a draft whose every weight is random, for the first `vocabulary` even and odd ids spread over the target's."""
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
