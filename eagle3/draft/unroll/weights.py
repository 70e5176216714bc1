"""The weights that a pass reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from eagle3.draft.model.config import DraftConfig
from eagle3.draft.model.network import Draft, Layer, Norm
from eagle3.draft.ops.linear import Weight
from eagle3.draft.unroll.projections import GroupedProjections, LatentProjections, Projections


class Weights(NamedTuple):
    """The weights in compute dtype, merged into as few matrices as a pass needs."""

    config: DraftConfig
    anchor: Tensor
    """a parameter: tells autograd that outputs depend on the weights, whose gradients it does not see"""
    fc: Weight
    """[H, A*H]"""
    fc_norm: tuple[Weight, ...]
    input_norm: Weight
    hidden_norm: Weight
    projections: Projections
    output: Weight
    """[H, Hq*dv], o_proj"""
    post_norm: Weight
    gate_up: Weight
    """[2I, H]"""
    down: Weight
    norm: Weight
    lm_head: Weight
    """[Vd, H]"""


def prepare(draft: Draft, dtype: torch.dtype, *, float8: bool = False) -> Weights:
    """Cast and merge the weights, once per pass: every step of the unroll reads the same ones.

    Args:
        draft: the float32 masters.
        dtype: what the pass computes in.
        float8: compute the products of `fc` and the layer in float8 (`eagle3.draft.ops.float8`). lm_head stays in
            `dtype`: errors of the logits enter the loss directly, and their gradients, tiny except for a few tokens of
            the vocabulary, do not fit float8's range.
    """
    layer = cast(Layer, draft.layers[0])
    fc_norm = cast(Iterable[Norm], draft.fc_norm) if draft.config.fc_norm else ()
    projections = LatentProjections if draft.config.latent else GroupedProjections
    weights = Weights(
        config=draft.config,
        anchor=draft.fc.weight,
        fc=Weight.of(dtype, draft.fc.weight),
        fc_norm=tuple(Weight.of(dtype, part.weight) for part in fc_norm),
        input_norm=Weight.of(dtype, layer.input_layernorm.weight),
        hidden_norm=Weight.of(dtype, layer.hidden_norm.weight),
        projections=projections.prepare(draft.config, layer.self_attn, dtype),
        output=Weight.of(dtype, layer.self_attn.o_proj.weight),
        post_norm=Weight.of(dtype, layer.post_attention_layernorm.weight),
        gate_up=Weight.of(dtype, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
        down=Weight.of(dtype, layer.mlp.down_proj.weight),
        norm=Weight.of(dtype, draft.norm.weight),
        lm_head=Weight.of(dtype, draft.lm_head.weight),
    )
    if not float8:
        return weights
    return weights._replace(
        fc=weights.fc.in_float8(),
        projections=weights.projections.in_float8(),
        output=weights.output.in_float8(),
        gate_up=weights.gate_up.in_float8(),
        down=weights.down.in_float8(),
    )
