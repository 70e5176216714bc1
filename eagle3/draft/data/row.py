"""Rows: a few samples packed end to end, with everything that one pass of the unroll needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle3.draft.data.packing import Array, Spans, sample_lifetimes, supervised_roots
from eagle3.draft.ops.flash import Segments
from eagle3.hidden_states.reader import HiddenStateSample


class TeacherStats(NamedTuple):
    """What a loss needs of the target's distribution over its whole vocabulary, at R roots (see `teacher.py`)."""

    top: Tensor
    """[R] int32: the target's most likely token as an index into the draft vocabulary; -1 if it is outside"""
    lse: Tensor
    """[R] float32: log-sum-exp of its logits l over the whole vocabulary"""
    draft_lse: Tensor
    """[R] float32: over the draft vocabulary D"""
    negentropy: Tensor
    """[R] float32: sum of q log q, q = softmax(l[D])"""


@dataclass(frozen=True)
class Row:
    """One packed row. C context positions (a sample is read up to its last root), R roots, n_t roots alive at step t.

    `root_context`, `teacher`, `labels` and `teacher_stats` are in position order; `order` and `slots` in lifetime
    order, longest first, so that the roots alive at step t are the first n_t. "Root r" is the r-th in position order.
    """

    ids: tuple[str, ...]
    """the samples"""
    aux: Tensor
    """[C, A, H] bf16"""
    next_tokens: Tensor
    """[C] int64: x[p+1]"""
    positions: Tensor
    """[C] int64: p inside its sample"""
    root_context: Tensor
    """[R] int64: the roots' indices into the context positions"""
    teacher: Tensor
    """[R, H] bf16: y[p+1], from which the target predicts x[p+2]"""
    labels: Tensor
    """[R] int64: x[p+2]"""
    order: Tensor
    """[R] int64: the roots by lifetime"""
    slots: Tensor
    """[R] int64: their slots among the attention's queries"""
    alive: tuple[int, ...]
    """n_t for every step with roots alive"""
    starts: Tensor
    """[steps+1] int64: where each step's outputs start among all [M], and M"""
    ahead: Tensor
    """[M] int64: the root at position p+t for every (step t, root p), in the order of the unroll's outputs; its
    teacher row teaches the pair, and in step 0 it reads the token that the pair reads"""
    pairs: Tensor
    """[M] int64: all (step, root) pairs as indices into the unroll's outputs, in the order of their teacher rows"""
    pair_places: Tensor
    """[M] int64: the inverse, the unroll's outputs as indices into `pairs`"""
    pair_steps: Tensor
    """[M] int64: their steps t"""
    pair_bounds: list[int]
    """[R+1]: teacher row r teaches the pairs pair_bounds[r] .. pair_bounds[r+1]-1"""
    pair_offsets: Tensor
    """the same as int64 on the device"""
    segments: Segments
    teacher_stats: TeacherStats | None = None
    """with `top` as int64; None until `with_teacher_stats`. Only the loss reads them."""

    def with_teacher_stats(self, stats: Sequence[TeacherStats]) -> Row:
        """Add the stats of the row's samples."""
        joined = TeacherStats(*(torch.cat(parts) for parts in zip(*stats, strict=True)))
        return replace(self, teacher_stats=joined._replace(top=joined.top.long()))

    def to(self, device: torch.device) -> Row:
        """Move the row; asynchronous from pinned memory."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        segments = replace(
            self.segments,
            q_offsets=self.segments.q_offsets.to(device, non_blocking=True),
            k_offsets=self.segments.k_offsets.to(device, non_blocking=True),
        )
        stats = self.teacher_stats and TeacherStats(*(x.to(device, non_blocking=True) for x in self.teacher_stats))
        return replace(self, segments=segments, teacher_stats=stats, **moved)

    def pin_memory(self) -> Row:
        """Copy the row into page-locked memory."""
        pinned: dict[str, Any] = {
            field.name: value.pin_memory()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        stats = self.teacher_stats and TeacherStats(*(x.pin_memory() for x in self.teacher_stats))
        return replace(self, teacher_stats=stats, **pinned)


def build_row(
    samples: Sequence[tuple[HiddenStateSample, Spans]],
    unroll: int,
    decay: float = 1.0,
    random: np.random.Generator | None = None,
) -> Row:
    """Pack samples into one row.

    Args:
        samples: hidden states and spans; every one has at least one root.
        unroll: number of steps T.
        decay: with `random`, the share of roots that the sampled unroll keeps at each step.
        random: None for the exact unroll.
    """
    parts = [_part(states, spans, unroll) for states, spans in samples]
    starts = np.concatenate([[0], np.cumsum([part.context for part in parts])])
    # Queries of a sample reach from its first root to its last one; slots between two spans stay empty.
    firsts = np.array([part.roots[0] for part in parts])
    query_starts = np.concatenate([[0], np.cumsum([part.context - part.roots[0] for part in parts])])
    offsets = zip(parts, starts[:-1], query_starts[:-1] - firsts, strict=True)
    slots, root_context = [], []
    for part, start, shift in offsets:
        root_context.append(part.roots + start)
        slots.append(part.roots + shift)
    lifetimes = np.concatenate([part.lifetimes for part in parts])
    if random is not None:
        lifetimes = sample_lifetimes(lifetimes, decay, random)
    order = np.argsort(-lifetimes, kind="stable")
    alive = tuple(int(n) for t in range(unroll) if (n := (lifetimes > t).sum()))
    return Row(
        ids=tuple(states.id for states, _ in samples),
        aux=torch.cat([states.aux[: part.context] for (states, _), part in zip(samples, parts, strict=True)]),
        next_tokens=torch.cat([part.tokens[1 : part.context + 1] for part in parts]),
        positions=torch.cat([torch.arange(part.context) for part in parts]),
        root_context=torch.from_numpy(np.concatenate(root_context)),
        teacher=torch.cat([part.teacher for part in parts]),
        labels=torch.cat([part.tokens[part.roots + 2] for part in parts]),
        order=torch.from_numpy(order),
        slots=torch.from_numpy(np.concatenate(slots)[order]),
        alive=alive,
        starts=torch.from_numpy(np.cumsum([0, *alive])),
        **_pair_fields(order, alive),
        segments=Segments(
            query_starts.tolist(),
            starts.tolist(),
            torch.from_numpy(query_starts.astype(np.int32)),
            torch.from_numpy(starts.astype(np.int32)),
        ),
    )


def _pair_fields(order: Array, alive: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a row about its (step, root) pairs."""
    ahead = np.concatenate([order[:n] + t for t, n in enumerate(alive)])
    pairs = np.argsort(ahead, kind="stable")
    bounds = np.searchsorted(ahead[pairs], np.arange(len(order) + 1))
    return {
        "ahead": torch.from_numpy(ahead),
        "pairs": torch.from_numpy(pairs),
        "pair_places": torch.from_numpy(np.argsort(pairs)),
        "pair_steps": torch.from_numpy(np.repeat(np.arange(len(alive)), alive)[pairs]),
        "pair_bounds": bounds.tolist(),
        "pair_offsets": torch.from_numpy(bounds),
    }


@dataclass(frozen=True)
class _Part:
    """What one sample contributes to a row."""

    roots: Array
    lifetimes: Array
    context: int
    tokens: Tensor
    teacher: Tensor


def _part(states: HiddenStateSample, spans: Spans, unroll: int) -> _Part:
    roots, lifetimes = supervised_roots(spans, unroll)
    teacher = states.last[states.rows_at(roots + 1)]
    return _Part(roots, lifetimes, int(roots[-1]) + 1, states.token_ids.long(), teacher)
