"""Audit stored samples: every frame is checked and decoded, every number is finite; statistics by layer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle3.errors import Eagle3Error
from eagle3.hidden_states import codec
from eagle3.hidden_states.shard import Shard
from eagle3.hidden_states.stored_sample import FrameError, Place, Provenance, StoredSample, decode_frames, places

# Decoded states that an audit holds per thread.
_GROUP_BYTES = 1 << 26


class Fault(NamedTuple):
    """Something that was damaged, or should never have been written."""

    check: str
    """Name of the check that found it."""
    file: str
    sample: str
    """Empty if the fault concerns the file."""
    detail: str


@dataclass(frozen=True)
class Statistics:
    """Sums over rows of every state; add up with `+`. L = number of states."""

    values: NDArray[np.int64]
    """[L]: numbers stored."""
    squares: NDArray[np.float64]
    """[L]: sum of squares."""
    largest: NDArray[np.float64]
    """[L]: largest magnitude."""
    packed: NDArray[np.int64]
    """[L]: bytes of zstd parts (exponents; in fp8 the codes)."""
    stored: NDArray[np.int64]
    """[L]: bytes of frames."""

    @staticmethod
    def zero(states: int) -> Statistics:
        def integers() -> NDArray[np.int64]:
            return np.zeros(states, np.int64)

        return Statistics(integers(), np.zeros(states), np.zeros(states), integers(), integers())

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.values + other.values,
            self.squares + other.squares,
            np.maximum(self.largest, other.largest),
            self.packed + other.packed,
            self.stored + other.stored,
        )

    def rows(self, layer_ids: Sequence[int]) -> list[dict[str, float]]:
        """Return one row of figures per layer."""
        return [
            {
                "layer": layer,
                "rms": float(np.sqrt(self.squares[i] / max(1, self.values[i]))),
                "largest": float(self.largest[i]),
                "bytes_per_bf16_byte": float(self.stored[i] / max(1, 2 * self.values[i])),
                "share_of_exponent_bytes": float(self.packed[i] / max(1, self.stored[i])),
            }
            for i, layer in enumerate(layer_ids)
        ]


@dataclass
class Audit:
    """The result for one sample."""

    stored: StoredSample | None
    faults: list[Fault] = field(default_factory=list)
    statistics: Statistics | None = None
    last_row: codec.Bits | None = None
    """[H]: the last state at the last position, for the teacher check."""


def audit_shard(shard: Shard, threads: int) -> list[Audit]:
    """Audit every sample of a shard, in its order."""

    def one(number: int) -> Audit:
        try:
            stored = shard.sample(number)
        except Eagle3Error as error:
            return Audit(None, [Fault("tokens", str(shard.path), shard.ids[number], error.problem)])
        return audit_sample(stored, shard.provenance, shard.ids)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(len(shard))))


def audit_sample(stored: StoredSample, provenance: Provenance, neighbours: Sequence[str] = ()) -> Audit:
    """Read and decode every frame of a sample, a few at a time.

    Args:
        stored: the sample.
        provenance: how it was written.
        neighbours: ids of samples whose frames may have been stored in place of this one's.
    """
    audit = Audit(stored)
    where = list(places(len(stored.token_ids), len(stored.last_rows), provenance.aux_layers))
    if len(where) != len(stored.checksums):
        found = f"{len(stored.checksums)} frames for {len(stored.token_ids)} tokens, {len(where)} expected"
        audit.faults.append(Fault("rows", str(stored.path), stored.id, found))
        return audit
    statistics = Statistics.zero(len(provenance.layer_ids))
    step = max(1, _GROUP_BYTES // (2 * codec.FRAME_ROWS * provenance.hidden_size))
    for first in range(0, len(where), step):
        group = where[first : first + step]
        targets = [np.empty((place.stop - place.start, provenance.hidden_size), np.uint16) for place in group]
        try:
            decode_frames(stored, provenance, first, first + len(group), targets)
        except FrameError as error:
            detail = f"{error.place}: {_owner(stored, provenance, where, error.frame, neighbours) or error.found}"
            audit.faults.append(Fault("checksum", str(stored.path), stored.id, detail))
            continue
        except Eagle3Error as error:
            audit.faults.append(Fault("truncated", str(stored.path), stored.id, error.problem))
            break
        for number, (place, target) in enumerate(zip(group, targets, strict=True), start=first):
            _measure(statistics, place, target, stored, number)
            if not np.isfinite(statistics.largest[place.state]):
                layer = provenance.layer_ids[place.state]
                audit.faults.append(Fault("finite", str(stored.path), stored.id, f"layer {layer} is not finite"))
                break
        audit.last_row = targets[-1][-1].copy()
    audit.statistics = statistics
    return audit


def _measure(statistics: Statistics, place: Place, target: codec.Bits, stored: StoredSample, number: int) -> None:
    values = (target.astype(np.uint32) << 16).view(np.float32)
    state = place.state
    statistics.values[state] += values.size
    statistics.largest[state] = np.maximum(statistics.largest[state], np.abs(values).max())
    statistics.squares[state] += np.square(values, out=values).sum(dtype=np.float64)
    statistics.packed[state] += stored.packed_bytes[number]
    statistics.stored[state] += stored.frame_bytes[number]


def _owner(
    stored: StoredSample, provenance: Provenance, where: Sequence[Place], frame: int, neighbours: Sequence[str]
) -> str | None:
    """Describe the frame in this frame's place, if it is another one of this sample or the same one of a neighbour."""
    payload = stored.read(frame, frame + 1)[0]
    known = set(stored.checksums.tolist())
    layer = provenance.layer_ids
    for other, place in enumerate(where):
        if zlib.crc32(payload, codec.seed(provenance.part, stored.id, other)) in known:
            return f"these are layer {layer[place.state]}, rows {place.start}-{place.stop - 1} of the same sample"
    for sample in neighbours:
        if zlib.crc32(payload, codec.seed(provenance.part, sample, frame)) == stored.checksums[frame]:
            return f"these are the states of sample {sample}"
    return None
