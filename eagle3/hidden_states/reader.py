"""Read hidden states: any sample of a set of shards by id, and streams with read-ahead for training."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle3.errors import Eagle3Error
from eagle3.hidden_states import codec
from eagle3.hidden_states.codec import FRAME_ROWS
from eagle3.hidden_states.shard import Shard
from eagle3.hidden_states.stored_sample import Int32s, Int64s, Provenance, StoredSample, count_frames, decode_frames

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HiddenStateSample:
    """The states of one sample. A = auxiliary layers, H = hidden size."""

    id: str
    token_ids: torch.Tensor
    """int32 [n]"""
    aux: torch.Tensor
    """bf16 [n, A, H]: the residual stream entering the auxiliary layers, ascending."""
    last: torch.Tensor
    """bf16 [m, H]: the last layer's output before the final norm."""
    last_rows: torch.Tensor
    """int64 [m]: the positions of the rows of `last`."""

    def rows_at(self, positions: Int64s) -> torch.Tensor:
        """Return the indices into `last` of some positions, int64 [len(positions)].

        Raises:
            Eagle3Error: a position has no row.
        """
        rows = self.last_rows.numpy()
        found = np.searchsorted(rows, positions)
        if found.max(initial=-1) >= len(rows) or (rows[found] != positions).any():
            raise Eagle3Error(
                "the hidden states lack last-layer rows that the loss reads",
                where=f"sample {self.id}",
                found=f"{len(rows)} rows, at {_range(rows)}",
                expected=f"rows at {_range(positions)}",
                remedy="delete the hidden states and run snakemake again",
            )
        return _tensor(found)


class HiddenStateReader:
    """All samples of a set of shards.

    Opening reads only headers and indexes (1,000 shards in under a second); a sample takes three reads. Safe to share
    between threads.

    Args:
        paths: the shards, of one or more captures with the same target, layers, encoding and engine.
        threads: number of samples that a stream decodes in parallel.

    Raises:
        Eagle3Error: a shard is missing, truncated or damaged; shards do not belong together; a duplicate sample id.
    """

    def __init__(self, paths: Sequence[Path], *, threads: int = 2) -> None:
        if not paths:
            raise Eagle3Error("there are no hidden-state shards to read", remedy="run the hidden_states stage")
        with ThreadPoolExecutor(min(8, len(paths))) as pool:
            self._shards = list(pool.map(Shard, paths))
        self.provenance: Provenance = self._shards[0].provenance
        self._threads = threads
        self._where: dict[str, tuple[int, int]] = {}
        for number, shard in enumerate(self._shards):
            _check_same_provenance(self._shards[0], shard)
            for index, sample in enumerate(shard.ids):
                if (known := self._where.setdefault(sample, (number, index))) != (number, index):
                    raise Eagle3Error(
                        "two hidden-state shards hold the same sample",
                        where=f"{shard.path}, sample {sample}",
                        found=self._shards[known[0]].path,
                        remedy="give the shards of one run only",
                    )
        self.ids: list[str] = list(self._where)
        """Ids of all samples, in the order of the shards."""
        self.tokens: Int64s = np.concatenate([shard.tokens for shard in self._shards])
        """int64 [N]: number of tokens of each sample, as in `ids`."""

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._where

    def read(
        self, sample: str | int, start: int = 0, stop: int | None = None, *, aux: bool = True
    ) -> HiddenStateSample:
        """Read one sample, or its tokens `start` to `stop`, and check every byte that is read.

        Memory is pinned where there is a CUDA device.

        Args:
            sample: its id, or its number in `ids`.
            start: first token.
            stop: token after the last; None is the end.
            aux: whether to read the auxiliary states; if not, `aux` is empty and little more than `last` is read.

        Returns:
            the sample; `last_rows` counts from the sample's first token, even in a slice.

        Raises:
            Eagle3Error: there is no such sample, or it is damaged.
        """
        shard, index = self._find(self.ids[sample] if isinstance(sample, int) else sample)
        return load(shard.sample(index), shard.provenance, start, stop, aux=aux)

    def stream(
        self,
        *,
        ids: Sequence[str] | None = None,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        ranks: int = 1,
        position: int = 0,
        ahead_tokens: int = 65536,
        aux: bool = True,
    ) -> Generator[HiddenStateSample]:
        """Read samples in an order that the seed determines, ahead of their use, in threads.

        Args:
            ids: the samples to read; all by default.
            seed: determines the order, together with `epoch`.
            epoch: number of the pass over the samples.
            rank: which of `ranks` shares to read; at any point of the streams, shares differ in tokens by less than two
                of the longest samples.
            ranks: number of shares.
            position: number of samples to skip, to continue an earlier stream.
            ahead_tokens: number of decoded tokens to hold; at least one sample is held.
            aux: as in `read`.

        Raises:
            Eagle3Error: as in `read`, when the stream reaches the damaged sample.
        """
        order = self.order(ids=ids, seed=seed, epoch=epoch, rank=rank, ranks=ranks)[position:]
        waiting: deque[tuple[int, Future[HiddenStateSample]]] = deque()
        ahead = 0
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hidden-states")
        try:
            for sample in order:
                tokens = self._tokens_of(sample)
                while waiting and ahead + tokens > ahead_tokens:
                    size, future = waiting.popleft()
                    yield future.result()
                    ahead -= size
                waiting.append((tokens, pool.submit(self.read, sample, aux=aux)))
                ahead += tokens
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            pool.shutdown(cancel_futures=True)

    def order(
        self, *, ids: Sequence[str] | None = None, seed: int = 0, epoch: int = 0, rank: int = 0, ranks: int = 1
    ) -> list[str]:
        """Return the ids that `stream` yields, in its order."""

        def place(sample: str) -> bytes:
            return hashlib.blake2b(f"{seed}/{epoch}/{sample}".encode(), digest_size=16).digest()

        shares: list[list[str]] = [[] for _ in range(ranks)]
        loads = [(0, share) for share in range(ranks)]
        for sample in sorted(self.ids if ids is None else ids, key=place):
            load, share = loads[0]
            shares[share].append(sample)
            heapq.heapreplace(loads, (load + self._tokens_of(sample), share))
        return shares[rank]

    def _tokens_of(self, sample: str) -> int:
        shard, index = self._find(sample)
        return int(shard.tokens[index])

    def _find(self, sample: str) -> tuple[Shard, int]:
        if sample not in self._where:
            raise Eagle3Error(
                "a sample has no hidden states",
                where=f"sample {sample}",
                found=f"{len(self):,} samples in {len(self._shards):,} shards",
                remedy="see stats.json of the hidden_states stage: it lists the samples whose capture failed",
            )
        number, index = self._where[sample]
        return self._shards[number], index


def load(
    stored: StoredSample, provenance: Provenance, start: int = 0, stop: int | None = None, *, aux: bool = True
) -> HiddenStateSample:
    """Read tokens `start` to `stop` of a sample; see `HiddenStateReader.read`."""
    n = len(stored.token_ids)
    start, stop, _ = slice(start, stop).indices(n)
    # The last row is for the teacher check only; no loss reads it.
    first_row, stop_row = (int(row) for row in np.searchsorted(stored.last_rows[:-1], (start, stop)))
    read_to = stop if aux else start
    states, skip = _decode_aux(stored, provenance, start, read_to)
    last, skip_rows = _decode_last(stored, provenance, first_row, stop_row)
    rows = stored.last_rows[first_row:stop_row]
    return HiddenStateSample(
        id=stored.id,
        token_ids=_tensor(stored.token_ids[start:stop]),
        aux=states[skip : skip + read_to - start],
        last=last[skip_rows : skip_rows + len(rows)],
        last_rows=_tensor(rows.astype(np.int64)),
    )


def _check_same_provenance(one: Shard, other: Shard) -> None:
    expected, found = one.provenance.comparable(), other.provenance.comparable()
    for name, value in expected.items():
        if found[name] != value:
            raise Eagle3Error(
                f"hidden-state shards of different captures are mixed: their {name.replace('_', ' ')} differs",
                where=other.path,
                found=found[name],
                expected=f"{value} (as in {one.path})",
                remedy="give the shards of one run only",
            )


def _decode_aux(stored: StoredSample, provenance: Provenance, start: int, stop: int) -> tuple[torch.Tensor, int]:
    """Return the auxiliary states [t, A, H] of the chunks that cover the tokens, and how many rows to skip."""
    A = provenance.aux_layers
    first, last = start // FRAME_ROWS, -(-stop // FRAME_ROWS)
    begin, end = first * FRAME_ROWS, max(first * FRAME_ROWS, min(last * FRAME_ROWS, len(stored.token_ids)))
    aux, bits = _empty(end - begin, A, provenance.hidden_size)
    targets = [bits[at : at + FRAME_ROWS, state] for at in range(0, end - begin, FRAME_ROWS) for state in range(A)]
    decode_frames(stored, provenance, A * first, A * first + len(targets), targets)
    return aux, start - begin


def _decode_last(stored: StoredSample, provenance: Provenance, start: int, stop: int) -> tuple[torch.Tensor, int]:
    """Return the last state [t, H] of the frames that cover the rows, and how many rows to skip."""
    first, last = start // FRAME_ROWS, -(-stop // FRAME_ROWS) if stop > start else start // FRAME_ROWS
    begin, end = first * FRAME_ROWS, min(last * FRAME_ROWS, len(stored.last_rows))
    states, bits = _empty(end - begin, 1, provenance.hidden_size)
    targets = [bits[at : at + FRAME_ROWS, 0] for at in range(0, end - begin, FRAME_ROWS)]
    offset = count_frames(len(stored.token_ids), 0, provenance.aux_layers) + first
    decode_frames(stored, provenance, offset, offset + len(targets), targets)
    return states[:, 0], start - begin


def _empty(rows: int, states: int, hidden_size: int) -> tuple[torch.Tensor, codec.Bits]:
    """Return an uninitialised bf16 tensor, pinned where there is a CUDA device, and its bits."""
    import torch

    tensor = torch.empty(max(rows, 0), states, hidden_size, dtype=torch.bfloat16, pin_memory=torch.cuda.is_available())
    return tensor, codec.bits(tensor)


def _range(positions: Int64s) -> str:
    return f"{positions[0]} to {positions[-1]}" if len(positions) else "none"


def _tensor(values: Int32s | Int64s) -> torch.Tensor:
    import torch

    return torch.from_numpy(values.copy())
