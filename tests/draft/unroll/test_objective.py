"""The chunked loss and its gradients equal a dense float64 evaluation of the formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.ops import logits
from eagle3.draft.ops.linear import Weight
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from eagle3.target.weights import HeadWeights
from tests.draft.conftest import H, V, random_draft, random_head, random_states, tiny_config, with_teacher_stats

UNROLL = 4
SPANS = [[(6, 16)], [(3, 5), (9, 20)]]
LOSSES: list[dict[str, Any]] = [
    {"loss": "kl"},
    {"loss": "kl", "true_mass": True},
    {"loss": "ce"},
    {"loss": "lk_alpha"},
    {"loss": "lk_lambda", "lk_scale": 0.7, "lk_decay": 3.0},
    {"loss": "lk_lambda", "true_mass": True},
]


def dense_loss(
    outputs: list[Tensor], lm_head: Tensor, head: HeadWeights, ids: Tensor, row: Row, settings: DraftSettings
) -> Tensor:
    """The plain definition: every teacher and student distribution in full, in the dtype of the inputs."""
    states = row.teacher.to(lm_head.dtype)
    normed = states / (states.pow(2).mean(-1, keepdim=True) + head.rms_norm_eps).sqrt() * head.norm
    logits = normed @ head.lm_head.T
    total = lm_head.new_zeros(())
    for t, output in enumerate(outputs):
        step = lm_head.new_zeros(())
        for place in range(len(output)):
            taught = logits[row.order[place] + t]
            top, r, q = int(taught.argmax()), taught.softmax(-1)[ids], taught[ids].softmax(-1)
            s = (lm_head @ output[place]).softmax(-1)
            inside = top in ids.tolist()
            reference = r if settings.true_mass else q
            kl = (reference * (reference.log() - s.log())).sum() if inside or settings.true_mass else s.sum() * 0
            alpha = torch.minimum(r, s).sum()
            if settings.loss == "kl":
                step = step + kl
            elif settings.loss == "ce":
                step = step - (s[ids.tolist().index(top)].log() if inside else s.sum() * 0)
            elif settings.loss == "lk_alpha":
                step = step - alpha.log()
            else:
                w = settings.lk_scale * (-settings.lk_decay * alpha.detach()).exp()
                step = step + w * kl + (1 - w) * (1 - alpha)
        total = total + settings.decay**t * step / len(output)
    return total


@pytest.mark.parametrize("changes", LOSSES, ids=str)
@pytest.mark.parametrize("chunk", [1, 1 << 14, 1 << 30])
def test_chunked_loss_equals_dense_float64(
    changes: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logits.CHUNK_BYTES, "cpu", chunk)
    generator = torch.Generator().manual_seed(2)
    settings = DraftSettings(unroll=UNROLL, **changes)
    head = random_head(generator)
    ids = torch.randperm(V, generator=generator)[:41].sort().values
    samples = [random_states(str(i), spans[-1][1], spans, generator) for i, spans in enumerate(SPANS)]
    row = with_teacher_stats(build_row(list(zip(samples, SPANS, strict=True)), UNROLL), head, ids)
    outputs = [torch.randn(n, H, generator=generator) for n in row.alive]
    lm_head = torch.randn(41, H, generator=generator) / 4

    hidden = torch.cat(outputs)
    head_parameter = torch.nn.Parameter(lm_head.clone())
    teacher = Teacher.of(head, ids, torch.device("cpu"), torch.float32)
    objective = Objective.of(settings, sampled=False)
    weight = Weight.of(torch.float32, head_parameter)
    outcome = projected_loss(hidden, weight, teacher, row, objective, row.alive)
    exact = [x.double().clone().requires_grad_() for x in (*outputs, lm_head)]
    wide = HeadWeights(head.embedding, head.norm.double(), head.lm_head.double(), head.rms_norm_eps)
    expected = dense_loss(exact[:-1], exact[-1], wide, ids, row, settings)
    expected.backward()

    torch.testing.assert_close(outcome.total.double(), expected, rtol=1e-5, atol=1e-6)
    assert outcome.gradient is not None
    assert head_parameter.grad is not None
    for one, other in zip((*outcome.gradient.split(row.alive), head_parameter.grad), exact, strict=True):
        torch.testing.assert_close(one.double(), other.grad, rtol=1e-4, atol=1e-7)
    drafted = torch.cat([(x @ exact[-1].T).argmax(-1) for x in exact[:-1]])
    assert torch.equal(outcome.drafted, drafted)


def test_a_draft_is_correct_only_if_it_is_the_best_token_of_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(3)
    head = random_head(generator)
    ids = torch.arange(0, V, 3)
    states = random_states("a", 40, [(1, 40)], generator)
    row = with_teacher_stats(build_row([(states, [(1, 40)])], 1), head, ids)
    teacher = Teacher.of(head, ids, torch.device("cpu"), torch.float32)
    # A student that knows the target's head exactly is right exactly where the target's choice is in its vocabulary.
    hidden = torch.nn.functional.rms_norm(row.teacher[row.order], (H,), head.norm, head.rms_norm_eps)
    lm_head = Weight(head.lm_head[ids], ())
    outcome = projected_loss(
        hidden, lm_head, teacher, row, Objective.of(DraftSettings(unroll=1), sampled=False), row.alive
    )
    top = (hidden @ head.lm_head.T).argmax(-1)
    inside = torch.isin(top, ids)
    assert 0 < int(inside.sum()) < len(top)
    assert torch.equal(outcome.correct, inside)
    assert torch.equal(ids[outcome.drafted[inside]], top[inside])


def test_positions_without_loss_have_exactly_zero_gradient() -> None:
    """Gradients reach auxiliary states up to the last root of their sample, and teacher-forced tokens likewise."""
    generator = torch.Generator().manual_seed(4)
    draft, head = random_draft(tiny_config(draft_vocab_size=V), generator), random_head(generator)
    embedding = head.embedding.requires_grad_()
    spans = [(6, 12)]
    states = random_states("a", 20, spans, generator)
    aux = states.aux.requires_grad_()
    row = with_teacher_stats(build_row([(states, spans)], UNROLL), head, draft.target_ids)
    weights = prepare(draft, torch.float32)
    teacher = Teacher.of(head, draft.target_ids, torch.device("cpu"), torch.float32)
    hidden = unroll(weights, row, embedding)
    objective = Objective.of(DraftSettings(unroll=UNROLL), sampled=False)
    outcome = projected_loss(hidden, weights.lm_head, teacher, row, objective, row.alive)
    hidden.backward(outcome.gradient)
    assert aux.grad is not None
    reached = aux.grad.flatten(1).abs().sum(1) > 0
    assert reached.tolist() == [p <= 9 for p in range(20)]
    assert embedding.grad is not None
    read = set((embedding.grad.abs().sum(1) > 0).nonzero()[:, 0].tolist())
    assert read == set(states.token_ids[1:11].tolist())


class Chosen(np.random.Generator):
    """Draws what it is told to."""

    def __init__(self, lifetimes: tuple[int, ...]) -> None:
        super().__init__(np.random.PCG64(0))
        self.lifetimes = lifetimes

    def geometric(self, p: Any, size: Any = None) -> Any:
        return np.array(self.lifetimes)


def test_sampled_unroll_has_the_exact_gradient_as_its_expectation() -> None:
    """Summed over every possible draw with its probability; what is drawn how often, test_packing checks."""
    generator = torch.Generator().manual_seed(8)
    draft, head = random_draft(tiny_config(), generator), random_head(generator)
    decay, steps = 0.6, 3
    settings = DraftSettings(unroll=steps, decay=decay)
    spans = [(3, 9)]
    states = random_states("a", 9, spans, generator)
    teacher = Teacher.of(head, draft.target_ids, torch.device("cpu"), torch.float32)
    exact_row = build_row([(states, spans)], steps)

    def gradient(row: Row, *, sampled: bool) -> Tensor:
        draft.zero_grad()
        weights = prepare(draft, torch.float32)
        hidden = unroll(weights, row, head.embedding)
        objective = Objective.of(settings, sampled=sampled)
        row = with_teacher_stats(row, head, draft.target_ids)
        outcome = projected_loss(hidden, weights.lm_head, teacher, row, objective, exact_row.alive)
        hidden.backward(outcome.gradient)
        return torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]).double()

    roots = len(exact_row.order)
    expectation = torch.zeros_like(gradient(exact_row, sampled=False))
    chances = {1: 1 - decay, 2: decay * (1 - decay), 3: decay**2}
    for draw in itertools.product(chances, repeat=roots):
        row = build_row([(states, spans)], steps, decay, Chosen(draw))
        expectation += math.prod(chances[n] for n in draw) * gradient(row, sampled=True)
    exact = gradient(exact_row, sampled=False)
    torch.testing.assert_close(expectation, exact, rtol=1e-4, atol=1e-6)
