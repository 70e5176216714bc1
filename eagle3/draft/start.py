"""The draft's first weights: as much of the target as fits, so that little data goes a long way."""

from __future__ import annotations

import torch

from eagle3.draft.model import Draft
from eagle3.draft.settings import DraftSettings
from eagle3.target import HeadWeights, Target


@torch.no_grad()
def start(draft: Draft, settings: DraftSettings, target: Target, head: HeadWeights) -> None:
    """Fill a new draft: lm_head from the target's rows of the draft vocabulary, the final norm from the target's."""
    generator = torch.Generator().manual_seed(settings.seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02, generator=generator)
    draft.lm_head.weight.copy_(head.lm_head[draft.target_ids])
    draft.norm.weight.copy_(head.norm)
