"""The weights that training starts from: as much of the target as fits, or those of an earlier draft model."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.config.draft import DraftSettings
from eagle3.draft.model.network import Draft
from eagle3.draft.model.warm_start import load_warm_start
from eagle3.target.pin import Target
from eagle3.target.weights import HeadWeights


@torch.no_grad()
def initialize(draft: Draft, settings: DraftSettings, target: Target, head: HeadWeights) -> None:
    """Fill a new draft model in place: from the target where possible, the rest at random; or from `warm_start`.

    lm_head and the final norm are copied from the target, and `fc` passes on the last auxiliary state, so that the
    draft model starts by reading the target's late layers. `docs/results.md` compares this with a random start.
    Copying a decoder layer of the target as well gained nothing on the demo.

    Raises:
        Eagle3Error: the draft model to start from has other settings or other tensors than this one.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02, generator=generator)
    if settings.start == "target":
        H = draft.config.hidden_size
        draft.fc.weight.zero_()
        draft.fc.weight[:, -H:] = torch.eye(H)
    draft.lm_head.weight.copy_(head.lm_head[draft.target_ids])
    draft.norm.weight.copy_(head.norm)
    if settings.warm_start is not None:
        load_warm_start(draft, Path(settings.warm_start), target)
