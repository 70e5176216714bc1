"""Training and evaluation samples: small facts in memory, hidden states read when their row comes."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle3.draft.data.packing import Spans, context_length, step_counts, supervised_roots
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.data.teacher import Summaries, Summariser, kept, summarise
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.hidden_states.reader import HiddenStateReader, HiddenStateSample

# Rows that are read and packed while the device works on the current one.
AHEAD = 3

Seed = int | tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What is kept of a sample record; the tokens themselves come with the hidden states."""

    id: str
    source: str
    spans: Spans
    context: int
    """positions that the draft reads"""
    digest: bytes
    """of the first context + 2 tokens"""


def read_samples(path: Path) -> tuple[list[Sample], int]:
    """Read the samples that have supervised positions, and count those that have none.

    Raises:
        Eagle3Error: no sample has any; a sample occurs twice.
    """
    samples, unsupervised = [], 0
    for record in read_records(path):
        context = context_length(record["spans"])
        if context == 0:
            unsupervised += 1
            continue
        digest = _digest(np.array(record["input_ids"][: context + 2], dtype=np.int32))
        samples.append(Sample(record["id"], record["source"], record["spans"], context, digest))
    if len({sample.id for sample in samples}) < len(samples):
        repeated = next(id for id, n in Counter(sample.id for sample in samples).items() if n > 1)
        raise Eagle3Error("a sample occurs twice", where=f"{path}, sample {repeated}", remedy="leave one of them out")
    if not samples:
        raise Eagle3Error(
            "no sample has a supervised position",
            where=path,
            found=f"{unsupervised} samples, each with less than two generated tokens in a row",
            remedy="look at the rejects of the stages before, and at the target's answers",
        )
    return samples, unsupervised


class Rows:
    """Builds rows of a list of samples from their hidden states, ahead of their use, in threads."""

    def __init__(
        self,
        samples: Sequence[Sample],
        reader: HiddenStateReader,
        unroll: int,
        device: torch.device,
        decay: float | None = None,
    ) -> None:
        """`decay` is given for the sampled unroll."""
        self.samples, self.reader, self.unroll, self.decay = samples, reader, unroll, decay
        self.pin = device.type == "cuda"

    def summarise(self, summariser: Summariser, path: Path | None = None, key: str = "") -> None:
        """Learn what the loss needs of the target's whole distribution, before any row is asked for.

        Args:
            summariser: the target's head.
            path: where to keep it for another start of the run.
            key: what it depends on.
        """

        def make() -> Summaries:
            return summarise({sample.id: sample.spans for sample in self.samples}, self.reader, summariser)

        self.summaries = make() if path is None else kept(path, key, make)

    def counts(self, members: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return, for every step, the positions with m_t = 1 in the given samples [unroll]."""
        parts = [step_counts(self.samples[index].spans, self.unroll) for index in members]
        return np.sum(parts, axis=0, dtype=np.int64) if parts else np.zeros(self.unroll, np.int64)

    def stream(self, rows: Iterable[tuple[Sequence[int], Seed]]) -> Iterator[Row]:
        """Yield one row for every (sample indices, seed of the sampled unroll), in order."""
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="rows") as pool:
            waiting: deque[Future[Row]] = deque()
            try:
                for members, seed in rows:
                    waiting.append(pool.submit(self._build, members, seed))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, members: Sequence[int], seed: Seed) -> Row:
        samples = [self.samples[index] for index in members]
        states = [self._read(sample) for sample in samples]
        pairs = [(part, sample.spans) for part, sample in zip(states, samples, strict=True)]
        if self.decay is None:
            row = build_row(pairs, self.unroll)
        else:
            row = build_row(pairs, self.unroll, self.decay, np.random.default_rng(seed))
        row = row.taught([self.summaries[sample.id] for sample in samples])
        return row.pin() if self.pin else row

    def _read(self, sample: Sample) -> HiddenStateSample:
        states = self.reader.read(sample.id, 0, sample.context + 2)
        if _digest(states.token_ids.numpy()) != sample.digest:
            raise Eagle3Error(
                "the hidden states of a sample belong to other tokens",
                where=f"sample {sample.id}",
                expected=f"the {sample.context + 2} first tokens of the data set's sample",
                remedy="delete the hidden states and run snakemake again",
            )
        return states


def root_ranges(samples: Sequence[Sample], members: Sequence[int], unroll: int) -> list[tuple[Sample, int, int]]:
    """Return every generated span's roots inside a row, as ranges of ranks, in order."""
    ranges, place = [], 0
    for index in members:
        for span in samples[index].spans:
            roots = len(supervised_roots([span], unroll)[0])
            if roots:
                ranges.append((samples[index], place, place + roots))
            place += roots
    return ranges


def data_digest(samples: Sequence[Sample]) -> str:
    """Return a hash over ids, spans and tokens: what makes two data sets the same for a run."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.id}{[list(span) for span in sample.spans]}".encode() + sample.digest)
    return digest.hexdigest()


def _digest(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
