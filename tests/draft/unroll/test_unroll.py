"""The unroll equals a chain that is decoded naively, one token at a time, with a KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import build_row
from eagle3.draft.model.config import DraftConfig
from eagle3.draft.training.optimizer import Optimizer
from eagle3.draft.unroll import unroll as unroll_module
from eagle3.draft.unroll.forward import Activations, forward
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.reference import ReferenceChain
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from tests.draft.conftest import H, V, random_draft, random_head, random_states, tiny_config, with_teacher_stats

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "full vocabulary": {"draft_vocab_size": V},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norm before residual": {"norm_before_residual": True},
    "two auxiliary layers": {"aux_layer_ids": (1, 4), "fc_norm": True},
    "one auxiliary layer": {"aux_layer_ids": (4,), "fc_norm": True},
    "one head each": {"num_key_value_heads": 4},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "all options": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "num_key_value_heads": 1},
    "mla": {"latent": True},
    "mla, all options": {"latent": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "mla, yarn": {
        "latent": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_unroll_equals_naive_chain_decoding(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    config: DraftConfig = tiny_config(**VARIANTS[name])
    draft = random_draft(config, generator)
    embedding = torch.randn(V, H, generator=generator)
    # Two samples in one row; the second has two generated spans.
    spans = [[(6, 14)], [(0, 5), (9, 15)]]
    aux = len(config.aux_layer_ids)
    samples = [random_states(str(i), n, spans[i], generator, aux=aux) for i, n in enumerate((15, 17))]
    row = build_row(list(zip(samples, spans, strict=True)), unroll=4)

    with torch.no_grad():
        outputs = unroll(prepare(draft, torch.float32), row, embedding).split(row.alive)
        logits = [draft.lm_head(output) for output in outputs]

    naive = ReferenceChain(draft, embedding)
    roots = [(sample, p) for sample, ranges in enumerate(spans) for s, e in ranges for p in range(max(s - 1, 0), e - 2)]
    lengths = {
        root: next(min(4, e - 2 - root[1]) for s, e in spans[root[0]] if s - 1 <= root[1] < e - 2) for root in roots
    }
    assert [len(step) for step in logits] == [sum(length > t for length in lengths.values()) for t in range(4)]
    for place, rank in enumerate(row.order.tolist()):
        sample, p = roots[rank]
        states = samples[sample]
        expected = naive.chain(states.token_ids.tolist(), states.aux, p, lengths[roots[rank]])
        for t, vector in enumerate(expected):
            torch.testing.assert_close(logits[t][place], vector, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_naive_chains(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    draft = random_draft(tiny_config(**VARIANTS[name]), generator)
    embedding = torch.randn(V, H, generator=generator)
    spans = [[(4, 9)], [(0, 4), (6, 9)]]
    aux = len(draft.config.aux_layer_ids)
    samples = [random_states(str(i), 9, ranges, generator, aux=aux) for i, ranges in enumerate(spans)]
    row = build_row(list(zip(samples, spans, strict=True)), unroll=3)
    # Any linear function of the outputs will do.
    factors = torch.randn(sum(row.alive), H, generator=generator)
    (unroll(prepare(draft, torch.float32), row, embedding) * factors).sum().backward()

    naive = ReferenceChain(draft, embedding.double())
    naive.weights = {name: p.detach().double().requires_grad_() for name, p in draft.named_parameters()}
    # With the identity as lm_head, the chain's logits are what an lm_head reads.
    naive.weights["lm_head.weight"] = torch.eye(H, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    starts = [0, row.segments.k[1]]
    for place, rank in enumerate(row.order.tolist()):
        context = int(row.root_context[rank])
        sample = int(context >= starts[1])
        lifetime = sum(n > place for n in row.alive)
        tokens, aux = samples[sample].token_ids.tolist(), samples[sample].aux.double()
        for t, vector in enumerate(naive.chain(tokens, aux, context - starts[sample], lifetime)):
            total = total + vector @ factors[sum(row.alive[:t]) + place].double()
    total.backward()
    for name, parameter in draft.named_parameters():
        if name != "lm_head.weight":
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.double(), naive.weights[name].grad, rtol=1e-4, atol=1e-4)


def test_a_pass_without_gradients_keeps_nothing_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    draft, states = random_draft(tiny_config(), generator), random_states("a", 20, [(3, 20)], generator)
    row, embedding = build_row([(states, [(3, 20)])], unroll=3), torch.randn(V, H, generator=generator)
    expected = unroll(prepare(draft, torch.float32), row, embedding)
    passes: list[Activations] = []

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Activations]:
        passes.append((result := forward(*args, **kwargs))[1])
        return result

    monkeypatch.setattr(unroll_module, "forward", watched)
    with torch.no_grad():
        assert torch.equal(unroll(prepare(draft, torch.float32), row, embedding), expected)
    (found,) = passes
    assert len(row.alive) == 3
    assert len(found.gate_up) == len(found.middle) == len(found.attended) == row.alive[0]
    assert not found.queries


@pytest.mark.parametrize("name", ["eagle-3", "mla, all options"])
def test_a_pass_makes_its_tensors_where_its_inputs_are(name: str) -> None:
    """As on a device without kernels, such as Apple's: here a tensor created anywhere else is on `meta`."""
    generator = torch.Generator().manual_seed(6)
    states = random_states("a", 30, [(3, 20)], generator)
    head, draft = random_head(generator), random_draft(tiny_config(**VARIANTS[name]), generator)
    row = with_teacher_stats(build_row([(states, [(3, 20)])], unroll=3), head, draft.target_ids)
    teacher = Teacher.of(head, draft.target_ids, torch.device("cpu"), torch.float32)
    objective = Objective.of(DraftSettings(unroll=3), sampled=False)

    def gradients() -> list[Tensor]:
        draft.zero_grad()
        weights = prepare(draft, torch.float32)
        hidden = unroll(weights, row, head.embedding)
        hidden.backward(projected_loss(hidden, weights.lm_head, teacher, row, objective, row.alive).gradient)
        return [parameter.grad for parameter in draft.parameters() if parameter.grad is not None]

    expected = gradients()
    with torch.device("meta"):
        found = gradients()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["eagle-3", "mla"])
def test_gradients_are_the_same_where_the_optimizer_lays_them_together(name: str) -> None:
    states = random_states("a", 20, [(3, 20)], torch.Generator().manual_seed(6))
    row = build_row([(states, [(3, 20)])], unroll=3)

    def gradients(*, together: bool) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(9)
        draft = random_draft(tiny_config(**VARIANTS[name]), generator)
        if together:
            Optimizer(draft.named_parameters(), DraftSettings())
        weights = prepare(draft, torch.float32)
        assert len(weights.gate_up.gradients) == (1 if together else 2)
        assert len(weights.projections.feature.whole.gradients) == 1 or not together
        hidden = unroll(weights, row, torch.randn(V, H, generator=generator))
        hidden.backward(torch.randn(hidden.shape, generator=generator))
        return {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}

    apart = gradients(together=False)
    for name, gradient in gradients(together=True).items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-5, atol=1e-6)


def test_packed_rows_equal_the_same_samples_alone() -> None:
    generator = torch.Generator().manual_seed(6)
    draft = random_draft(tiny_config(), generator)
    embedding = torch.randn(V, H, generator=generator)
    spans = [[(6, 14)], [(3, 30)], [(2, 9), (12, 20)]]
    samples = [random_states(str(i), ranges[-1][1], ranges, generator) for i, ranges in enumerate(spans)]
    together = build_row(list(zip(samples, spans, strict=True)), unroll=5)
    with torch.no_grad():
        weights = prepare(draft, torch.float32)
        packed = unroll(weights, together, embedding).split(together.alive)
        shift = 0
        for states, ranges in zip(samples, spans, strict=True):
            alone_row = build_row([(states, ranges)], unroll=5)
            alone = unroll(weights, alone_row, embedding).split(alone_row.alive)
            places = {rank: place for place, rank in enumerate(together.order.tolist())}
            for t, output in enumerate(alone):
                for place, rank in enumerate(alone_row.order.tolist()[: len(output)]):
                    torch.testing.assert_close(packed[t][places[rank + shift]], output[place], rtol=1e-5, atol=1e-6)
            shift += len(alone_row.order)
