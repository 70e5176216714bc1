"""Training and evaluation samples: metadata in memory, hidden states read when their row is built."""

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
from eagle3.draft.data.teacher import StatsBySample, TeacherHead, cached_stats, compute_stats
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.hidden_states.reader import HiddenStateReader, HiddenStateSample

# Rows built ahead, while the device works on the current one.
AHEAD = 3

Seed = int | tuple[int, ...]


@dataclass(frozen=True)
class TrainingSample:
    """The part of a sample record that stays in memory; the tokens themselves come with the hidden states."""

    id: str
    source: str
    spans: Spans
    context: int
    """positions that the draft reads"""
    digest: bytes
    """of the first context + 2 tokens"""


def read_samples(path: Path) -> tuple[list[TrainingSample], int]:
    """Return the samples that have supervised positions, and the number of those that have none.

    Raises:
        Eagle3Error: no sample has any; a sample id occurs twice.
    """
    samples, unsupervised = [], 0
    for record in read_records(path):
        context = context_length(record["spans"])
        if context == 0:
            unsupervised += 1
            continue
        digest = _digest(np.array(record["input_ids"][: context + 2], dtype=np.int32))
        samples.append(TrainingSample(record["id"], record["source"], record["spans"], context, digest))
    if len({sample.id for sample in samples}) < len(samples):
        repeated = next(id for id, n in Counter(sample.id for sample in samples).items() if n > 1)
        raise Eagle3Error("duplicate sample id", where=f"{path}, sample {repeated}", remedy="remove one of them")
    if not samples:
        raise Eagle3Error(
            "no sample has a supervised position",
            where=path,
            found=f"{unsupervised} samples, each with fewer than two consecutive generated tokens",
            remedy="check the rejects of the earlier stages and the target's answers",
        )
    return samples, unsupervised


class RowLoader:
    """Builds rows from the hidden states of a list of samples, ahead of their use, in threads."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        reader: HiddenStateReader,
        unroll: int,
        device: torch.device,
        decay: float | None = None,
    ) -> None:
        """`decay` selects the sampled unroll; None the exact one."""
        self.samples, self.reader, self.unroll, self.decay = samples, reader, unroll, decay
        self.pin_memory = device.type == "cuda"

    def load_teacher_stats(self, head: TeacherHead, path: Path | None = None, key: str = "") -> None:
        """Compute the teacher stats of all samples, or read them; call this before asking for any row.

        Args:
            head: the target's head.
            path: file that keeps them for the next start of the run.
            key: identifies what they depend on.
        """

        def compute() -> StatsBySample:
            return compute_stats({sample.id: sample.spans for sample in self.samples}, self.reader, head)

        self.teacher_stats = compute() if path is None else cached_stats(path, key, compute)

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
        row = row.with_teacher_stats([self.teacher_stats[sample.id] for sample in samples])
        return row.pin_memory() if self.pin_memory else row

    def _read(self, sample: TrainingSample) -> HiddenStateSample:
        states = self.reader.read(sample.id, 0, sample.context + 2)
        if _digest(states.token_ids.numpy()) != sample.digest:
            raise Eagle3Error(
                "the hidden states of a sample were captured from other tokens",
                where=f"sample {sample.id}",
                expected=f"the first {sample.context + 2} tokens of the dataset's sample",
                remedy="delete the hidden states and run snakemake again",
            )
        return states


def root_ranges(
    samples: Sequence[TrainingSample], members: Sequence[int], unroll: int
) -> list[tuple[TrainingSample, int, int]]:
    """Return the roots of every generated span in a row, as ranges [first, end) in position order."""
    ranges, place = [], 0
    for index in members:
        for span in samples[index].spans:
            roots = len(supervised_roots([span], unroll)[0])
            if roots:
                ranges.append((samples[index], place, place + roots))
            place += roots
    return ranges


def data_digest(samples: Sequence[TrainingSample]) -> str:
    """Return a hash over ids, spans and tokens: datasets with the same hash are equivalent for a run."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.id}{[list(span) for span in sample.spans]}".encode() + sample.digest)
    return digest.hexdigest()


def _digest(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
