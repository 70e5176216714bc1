"""The floating-point operations of a training pass; a multiply-add counts as two.

Element-wise work is not counted, nor is what kernels compute and discard (masked blocks, empty queries).
"""

from __future__ import annotations

from eagle3.draft.data.row import Row
from eagle3.draft.model.config import DraftConfig

# The gradients of a product are two more products; those of flash attention, which recomputes the scores, 2.5 times
# its forward.
PRODUCT, WEIGHT_ONLY, ATTENTION = 3.0, 2.0, 3.5


def training_flops(config: DraftConfig, row: Row) -> float:
    """Return the operations of forward and backward for one row, teacher included."""
    H, width, Vd = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    context, roots, pairs = len(row.positions), len(row.order), sum(row.alive)
    q, kv, q_latent, kv_latent = _projection_sizes(config)
    value_dim = config.latent.v_head_dim if config.latent else config.head_dim
    heads = config.num_attention_heads
    keys = context + sum(row.alive[1:])
    # Norms before `fc` need the gradient of its input.
    combined = (PRODUCT if config.fc_norm else WEIGHT_ONLY) * context * len(config.aux_layer_ids) * H * H
    tokens = PRODUCT * H * (roots * q + context * kv)
    features = PRODUCT * (pairs * (H * q + q_latent) + keys * (H * kv + kv_latent))
    rest = PRODUCT * pairs * (heads * value_dim * H + 3 * H * width + H * Vd)
    visible = sum(n * _visible_keys(row) / roots + n * t for t, n in enumerate(row.alive))
    attention = ATTENTION * visible * heads * (config.head_dim + value_dim)
    teacher = roots * H * Vd
    return 2 * (combined + tokens + features + rest + attention + teacher)


def _projection_sizes(config: DraftConfig) -> tuple[int, int, int, int]:
    """Return the outputs of the projections that read H, and the weights of MLA's second projections."""
    heads = config.num_attention_heads
    if config.latent is None:
        return heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim, 0, 0
    shape = config.latent
    return (
        shape.q_lora_rank,
        shape.kv_lora_rank + shape.qk_rope_head_dim,
        shape.q_lora_rank * heads * config.head_dim,
        shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim),
    )


def _visible_keys(row: Row) -> float:
    """Return the number of (query, visible key) pairs of step 0."""
    total = 0.0
    for i in range(len(row.segments.q) - 1):
        queries = row.segments.q[i + 1] - row.segments.q[i]
        keys = row.segments.k[i + 1] - row.segments.k[i]
        total += queries * keys - queries * (queries - 1) / 2
    return total
