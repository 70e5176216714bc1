"""The draft network, and its unroll over packed samples.

Notation (EAGLE-3, arXiv 2503.01840): x tokens, a[p] the target's auxiliary states at position p, g_t[p] the draft's
residual stream for the chain rooted at p after step t. Step t = 0..T-1 reads the token x[p+1+t] and predicts x[p+2+t]:

    g_{-1}[p] = fc(a[p])
    u         = concat(norm_in(E(x[p+1+t])), norm_h(g_{t-1}[p]))
    g_t[p]    = decoder layer over u on the residual stream g_{t-1}[p]
    h_t[p]    = norm_out(g_t[p]), read by lm_head

Shapes: C context positions and R roots of a row, n_t roots alive at step t, H hidden size, A auxiliary states.

Three things make the unroll cheap. Roots are sorted by lifetime, so the roots alive at step t are the first n_t rows
of every tensor. Beyond K_0 and V_0, nothing is computed where no root stands. And the half of the q, k, v projections
that reads the token depends on the position p+1+t alone: it is computed once per position, not once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle3.draft.accelerate import compiled_on_gpu
from eagle3.draft.attention import unrolled_attention
from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.draft.projections import GroupedProjections, LatentProjections, Projections, norm
from eagle3.draft.rows import Row
from eagle3.errors import Eagle3Error

WEIGHTS = "model.safetensors"


class Norm(nn.Module):
    """Carries the weight of an RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, width, bias=False)
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)


class Layer(nn.Module):
    """The one decoder layer."""

    self_attn: Any
    """projections under the names that the kind of attention has"""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.input_layernorm = Norm(H)
        self.hidden_norm = Norm(H)
        self.post_attention_layernorm = Norm(H)
        self.self_attn = _attention_weights(config)
        self.mlp = MLP(config)


class Draft(nn.Module):
    """The draft's trainable weights, under the names that the engines load. The embedding is the target's, frozen."""

    d2t: Tensor
    """[Vd] int64: target id of draft token i is i + d2t[i]"""
    t2d: Tensor
    """[V] bool: whether a target id is in the draft vocabulary"""

    def __init__(self, config: DraftConfig, d2t: Tensor, t2d: Tensor) -> None:
        super().__init__()
        H, A = config.hidden_size, len(config.aux_layer_ids)
        self.config = config
        self.fc = nn.Linear(A * H, H, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(H) for _ in range(A))
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(H)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class Weights(NamedTuple):
    """The weights in compute dtype, merged into as few matrices as the forward pass needs. Gradients flow back."""

    config: DraftConfig
    fc: Tensor
    """[H, A*H]"""
    fc_norm: tuple[Tensor, ...]
    input_norm: Tensor
    hidden_norm: Tensor
    projections: Projections
    output: Tensor
    """[H, Hq*dv], o_proj"""
    post_norm: Tensor
    gate_up: Tensor
    """[2I, H]"""
    down: Tensor
    norm: Tensor
    lm_head: Tensor
    """[Vd, H]"""


def prepare(draft: Draft, dtype: torch.dtype) -> Weights:
    """Cast and merge the weights, once per pass: every step of the unroll reads the same ones."""
    layer = cast(Layer, draft.layers[0])
    fc_norm = cast(Iterable[Norm], draft.fc_norm) if draft.config.fc_norm else ()
    projections = LatentProjections if draft.config.latent else GroupedProjections
    return Weights(
        config=draft.config,
        fc=draft.fc.weight.to(dtype),
        fc_norm=tuple(part.weight.to(dtype) for part in fc_norm),
        input_norm=layer.input_layernorm.weight.to(dtype),
        hidden_norm=layer.hidden_norm.weight.to(dtype),
        projections=projections.prepare(draft.config, layer.self_attn, dtype),
        output=layer.self_attn.o_proj.weight.to(dtype),
        post_norm=layer.post_attention_layernorm.weight.to(dtype),
        gate_up=torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).to(dtype),
        down=layer.mlp.down_proj.weight.to(dtype),
        norm=draft.norm.weight.to(dtype),
        lm_head=draft.lm_head.weight.to(dtype),
    )


def combine(weights: Weights, aux: Tensor) -> Tensor:
    """Return g_{-1} [C, H] from auxiliary states [C, A, H]."""
    if weights.fc_norm:
        eps = weights.config.rms_norm_eps
        aux = torch.stack([norm(part, w, eps) for part, w in zip(aux.unbind(1), weights.fc_norm, strict=True)], 1)
    return functional.linear(aux.flatten(1), weights.fc)


def unroll(weights: Weights, row: Row, embedding: Tensor) -> list[Tensor]:
    """Run all steps over one packed row.

    Args:
        weights: from `prepare`.
        row: samples and roots.
        embedding: [V, H], the target's.

    Returns:
        for every step t with roots alive, h_t [n_t, H] in the row's root order.
    """
    eps = weights.config.rms_norm_eps
    heads = weights.projections
    entering = norm(embedding[row.next_tokens].to(weights.fc.dtype), weights.input_norm, eps)
    # Token p+1+t of root p stands at context position p+t, which is a root, too.
    entering_q = heads.enter_q(entering.index_select(0, row.root_context))
    entering_kv = heads.enter_kv(entering)

    context = combine(weights, row.aux.to(weights.fc.dtype))
    normed = norm(context, weights.hidden_norm, eps)
    k0, v0 = heads.keys(entering_kv, normed, row.positions)

    roots = row.root_context[row.ranks]
    positions = row.positions[roots]
    stream, normed = context.index_select(0, roots), normed.index_select(0, roots)
    own: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for t, n in enumerate(row.alive):
        if t > 0:
            stream = stream[:n]
            normed = norm(stream, weights.hidden_norm, eps)
            own = [(k[:n], v[:n]) for k, v in own]
            own.append(heads.keys(entering_kv.index_select(0, roots[:n] + t), normed, positions[:n] + t))
        q = heads.queries(entering_q.index_select(0, row.ranks[:n] + t), normed, positions[:n] + t)
        attended = unrolled_attention(q, k0, v0, own, row.slots[:n], row.segments, heads.scale)
        residual = normed if weights.config.norm_before_residual else stream
        stream, output = finish(attended, residual, weights)
        outputs.append(output)
        if weights.config.norm_output:
            stream = output
    return outputs


def finish(attended: Tensor, residual: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Second half of the layer: [n, Hq, dv] and [n, H] -> g_t and h_t, both [n, H]."""
    return _finish(
        attended.flatten(1),
        residual,
        weights.output,
        weights.post_norm,
        weights.gate_up,
        weights.down,
        weights.norm,
        weights.config.rms_norm_eps,
    )


@compiled_on_gpu
def _finish(
    attended: Tensor,
    residual: Tensor,
    output: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    final_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    stream = residual + functional.linear(attended, output)
    gate, up = functional.linear(norm(stream, post_norm, eps), gate_up).chunk(2, dim=-1)
    stream = stream + functional.linear(functional.silu(gate) * up, down)
    return stream, norm(stream, final_norm, eps)


def load_draft(folder: Path) -> Draft:
    """Load a draft artifact (`draft.json`, `model.safetensors`) on the CPU, in float32.

    Raises:
        Eagle3Error: tensors are missing or have other shapes than the config says; names them.
    """
    from safetensors.torch import load_file

    config = read_draft_config(folder)
    tensors = load_file(folder / WEIGHTS)
    with torch.device("meta"):
        draft = Draft(config, torch.empty(config.draft_vocab_size, dtype=torch.int64), torch.empty(config.vocab_size))
    expected = {name: list(tensor.shape) for name, tensor in draft.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        raise Eagle3Error(
            "a draft's weights do not fit its config",
            where=folder / WEIGHTS,
            found={name: found.get(name) for name in differing},
            expected={name: expected.get(name) for name in differing},
            remedy="delete the draft and run snakemake again",
        )
    draft.load_state_dict(tensors, assign=True)
    return draft


def _attention_weights(config: DraftConfig) -> nn.Module:
    H, heads = config.hidden_size, config.num_attention_heads
    module = nn.Module()
    linears: dict[str, Sequence[int]]
    if config.latent is None:
        groups, dim = config.num_key_value_heads, config.head_dim
        linears = {
            "q_proj": (2 * H, heads * dim),
            "k_proj": (2 * H, groups * dim),
            "v_proj": (2 * H, groups * dim),
            "o_proj": (heads * dim, H),
        }
    else:
        shape = config.latent
        linears = {
            "q_a_proj": (2 * H, shape.q_lora_rank),
            "q_b_proj": (shape.q_lora_rank, heads * config.head_dim),
            "kv_a_proj_with_mqa": (2 * H, shape.kv_lora_rank + shape.qk_rope_head_dim),
            "kv_b_proj": (shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim)),
            "o_proj": (heads * shape.v_head_dim, H),
        }
        module.q_a_layernorm = Norm(shape.q_lora_rank)
        module.kv_a_layernorm = Norm(shape.kv_lora_rank)
    for name, (inputs, outputs) in linears.items():
        setattr(module, name, nn.Linear(inputs, outputs, bias=False))
    return module
