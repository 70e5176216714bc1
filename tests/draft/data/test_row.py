"""Training covers exactly what serving verifies: every draft token, in the context it would have, and no other.

The reference serves the recorded conversations with a drafter that is sometimes right, in every possible
pattern; it does not use roots, lifetimes or rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.draft.data.packing import supervised_roots
from eagle3.draft.data.row import Row, build_row
from eagle3.hidden_states.reader import HiddenStateSample

Spans = list[tuple[int, int]]
H = 2


class Verified(NamedTuple):
    """One draft token that the target verifies."""

    states: tuple[float, ...]
    """the target's states that the drafter has read, by their position's mark"""
    tokens: tuple[int, ...]
    """the tokens that it has read with them, each one position later: the second one up to the last committed one"""
    drafts: tuple[int, ...]
    """its earlier draft tokens of this step, all of them right"""
    truth: int
    """what the draft token is compared with"""
    judge: float
    """the target's state that decides"""


class Document(NamedTuple):
    """A recorded conversation: every token and state is unique."""

    number: int
    length: int
    spans: Spans

    def token(self, place: int) -> int:
        return 100 * self.number + place

    def state(self, place: int) -> float:
        return 100.0 * self.number + place + 0.5

    @property
    def states(self) -> HiddenStateSample:
        marks = torch.tensor([self.state(place) for place in range(self.length)])
        rows = [row for start, end in self.spans for row in range(max(start - 1, 0), end - 1)]
        return HiddenStateSample(
            id=str(self.number),
            token_ids=torch.tensor([self.token(place) for place in range(self.length)], dtype=torch.int32),
            aux=marks[:, None, None].expand(self.length, 3, H),
            last=marks[rows][:, None].expand(len(rows), H),
            last_rows=torch.tensor(rows, dtype=torch.int64),
        )


def serve(document: Document, drafts: int) -> set[Verified]:
    """Serve every generation, `drafts` tokens ahead, with every possible number of right draft tokens at every step."""
    verified = set()
    for start, end in document.spans:
        # The prompt gives the first token. An engine needs one prompt token: without a prompt, the answer's first.
        waiting, seen = [max(start, 1) + 1], set()
        while waiting:
            committed = waiting.pop()
            # The end of the turn is committed, or this step was served before.
            if committed >= end or committed in seen:
                continue
            seen.add(committed)
            for right in range(drafts + 1):
                for number in range(min(right + 1, drafts)):
                    place = committed + number
                    if place < end:
                        verified.add(
                            Verified(
                                states=tuple(document.state(p) for p in range(committed - 1)),
                                tokens=tuple(document.token(p) for p in range(1, committed)),
                                drafts=tuple(document.token(p) for p in range(committed, place)),
                                truth=document.token(place),
                                judge=document.state(place - 1),
                            )
                        )
                waiting.append(committed + right + 1)
    return verified


def trained(row: Row) -> list[Verified]:
    """Return what a packed row trains, read off the tensors that the model reads."""
    teacher_of = dict(zip(row.pairs.tolist(), row.ahead[row.pairs].tolist(), strict=True))
    found = []
    output = 0
    for step, count in enumerate(row.alive):
        for place in range(count):
            rank, slot = int(row.order[place]), int(row.slots[place])
            root = int(row.root_context[rank])
            sample = next(i for i in range(len(row.ids)) if row.segments.q[i] <= slot < row.segments.q[i + 1])
            first = row.segments.k[sample]
            # The last query sees the last key.
            last = row.segments.k[sample + 1] - (row.segments.q[sample + 1] - slot)
            assert last == root
            assert int(row.root_context[rank + step]) == root + step
            fed = row.next_tokens[root + 1 : root + 1 + step].tolist()
            teacher = teacher_of[output]
            assert row.positions[first : last + 1].tolist() == list(range(last + 1 - first))
            found.append(
                Verified(
                    states=tuple(row.aux[first : last + 1, 0, 0].tolist()),
                    tokens=tuple(row.next_tokens[first : last + 1].tolist()),
                    drafts=tuple(fed),
                    truth=int(row.labels[teacher]),
                    judge=float(row.teacher[teacher, 0]),
                )
            )
            output += 1
    return found


@st.composite
def documents(draw: st.DrawFn) -> list[Document]:
    """Conversations of alternating prompts and answers; some without a prompt, some with text after the last answer."""
    found = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        spans: Spans = []
        length = 0
        for _ in range(draw(st.integers(1, 3))):
            start = length + draw(st.integers(0, 5))
            length = start + draw(st.integers(1, 8))
            spans.append((start, length))
        found.append(Document(number, length + draw(st.integers(0, 3)), spans))
    return found


@given(documents(), st.integers(1, 5))
def test_rows_train_exactly_what_serving_verifies(everything: list[Document], drafts: int) -> None:
    served = [serve(document, drafts) for document in everything]
    asked = [document for document, verified in zip(everything, served, strict=True) if verified]
    if not asked:
        return
    row = build_row([(document.states, document.spans) for document in asked], drafts)
    found = trained(row)
    assert len(found) == len(set(found))
    assert set(found) == set().union(*served)


@given(documents(), st.integers(1, 5))
def test_the_mask_is_the_rule(everything: list[Document], unroll: int) -> None:
    """m_t[p] = 1 iff p+1 and p+2+t lie in the same generated span."""
    for document in everything:
        roots, lifetimes = supervised_roots(document.spans, unroll)
        mask = {(p, t) for p, n in zip(roots.tolist(), lifetimes.tolist(), strict=True) for t in range(n)}
        assert mask == {
            (p, t)
            for p in range(document.length)
            for t in range(unroll)
            if any(start <= p + 1 < end and start <= p + 2 + t < end for start, end in document.spans)
        }
