"""What a training step never holds: logits of a whole row, and scores of all positions by all positions."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.ops import causal_attention, logits
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from tests.draft.conftest import random_draft, random_head, random_states, tiny_config

# Vocabularies wider than anything else, a row longer than wide.
LENGTH, V, Vd, UNROLL, BLOCK = 600, 2000, 1000, 4, 16
Loss = Literal["kl", "ce", "lk_lambda"]
CPU = torch.device("cpu")
WHOLE = 1 << 40


class Watch(TorchDispatchMode):
    """Records the shapes of all tensors that are created, including in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.shapes += [tuple(leaf.shape) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        return made

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(torch.Size(shape).numel() for shape in self.shapes)

    def rows(self, width: int) -> int:
        """Rows of the longest tensor of that width."""
        return max(torch.Size(shape[:-1]).numel() for shape in self.shapes if len(shape) > 1 and shape[-1] == width)


def watch(lengths: list[int], loss: Loss = "kl", **changes: Any) -> tuple[Row, Watch, Watch]:
    """Return a row of answers of these lengths, the tensors of its training step, and those of its teacher stats."""
    generator = torch.Generator().manual_seed(1)
    draft = random_draft(tiny_config(vocab_size=V, draft_vocab_size=Vd, **changes), generator)
    head = random_head(generator, vocabulary=V)
    spans = [[(2, 2 + length)] for length in lengths]
    samples = [random_states(str(i), span[0][1], span, generator) for i, span in enumerate(spans)]
    row = build_row(list(zip(samples, spans, strict=True)), UNROLL)
    with Watch() as stats:
        row = row.with_teacher_stats([TeacherHead(head, draft.target_ids, CPU, torch.float32)(row.teacher)])
    teacher = Teacher.of(head, draft.target_ids, CPU, torch.float32)
    objective = Objective.of(DraftSettings(unroll=UNROLL, loss=loss), sampled=False)
    with Watch() as step:
        weights = prepare(draft, torch.float32)
        hidden = unroll(weights, row, head.embedding)
        # Losses are weighted by counts; any will do here.
        outcome = projected_loss(hidden, weights.lm_head, teacher, row, objective, [1] * UNROLL)
        hidden.backward(outcome.gradient)
    return row, step, stats


@pytest.mark.parametrize("latent", [False, True], ids=["gqa", "mla"])
def test_nothing_is_as_large_as_a_rows_logits_or_scores(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_attention, "BLOCK", BLOCK)
    monkeypatch.setitem(logits.CHUNK_BYTES, "cpu", 32 * 4 * V)
    row, step, stats = watch([LENGTH], latent=latent)
    C = len(row.positions)
    assert step.largest < C * min(C, Vd)
    assert stats.largest < C * min(C, V)
    # The recorder does see them where they exist.
    monkeypatch.setattr(causal_attention, "BLOCK", WHOLE)
    assert watch([LENGTH], latent=latent)[1].largest >= C * C
    monkeypatch.setattr(causal_attention, "BLOCK", BLOCK)
    monkeypatch.setitem(logits.CHUNK_BYTES, "cpu", WHOLE)
    row, step, stats = watch([LENGTH], latent=latent)
    assert step.rows(Vd) == sum(row.alive)
    assert stats.rows(V) == len(row.order)


@pytest.mark.parametrize("loss", get_args(Loss))
# A teacher has at most one student of each step: space for one teacher with all of its students, and for some more.
@pytest.mark.parametrize("fits", [UNROLL, 30])
@pytest.mark.parametrize("lengths", [[2], [3, 200], [60, 2, 9, 2, 2, 40]], ids=str)
def test_a_chunk_of_logits_keeps_to_its_bytes(
    lengths: list[int], fits: int, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logits.CHUNK_BYTES, "cpu", fits * 4 * Vd)
    _, step, stats = watch(lengths, loss)
    assert step.rows(Vd) <= fits
    assert stats.rows(V) <= max(fits * Vd // V, 1)
