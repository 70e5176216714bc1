"""The state of a capture: finished shards, and a log for each of the others; both survive a kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle3 import console
from eagle3.errors import Eagle3Error
from eagle3.files.atomic import atomic_write, sync
from eagle3.hidden_states import codec
from eagle3.hidden_states.audit import Statistics, audit_shard
from eagle3.hidden_states.capture_log import FOLDER, CaptureLog, log_path, read_provenance, write_provenance
from eagle3.hidden_states.shard import Shard, write_shard
from eagle3.hidden_states.stored_sample import Provenance, StoredSample, decode_frames
from eagle3.hidden_states.teacher import GROUP, teacher_tokens

if TYPE_CHECKING:
    from eagle3.target.weights import HeadWeights


@dataclass(frozen=True)
class FinishedShard:
    """A shard that was read back in full, with its counts."""

    provenance: Provenance
    ids: list[str]
    tokens: int
    bytes: int
    statistics: Statistics
    disagreed: list[str]
    """Samples whose teacher token differs from the engine's."""


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard in the stage's folder."""
    return folder / f"shard-{number}.safetensors"


class CaptureState:
    """The state of a capture, resumed from an earlier run.

    Every frame that is found is checked; damaged samples are left out and recaptured.

    Args:
        folder: the stage's work folder.
        part: see `Provenance.part`.
        shards: number of shards.
        layer_ids: see `Provenance.layer_ids`.
        threads: for reading back.
    """

    def __init__(self, folder: Path, *, part: str, shards: int, layer_ids: Sequence[int], threads: int) -> None:
        self._folder = folder
        self._scratch = folder / FOLDER
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._threads = threads
        self._states = len(layer_ids)
        self._shards = shards
        provenance = read_provenance(self._scratch)
        self.provenance = provenance if provenance is not None and provenance.part == part else None
        self.finished: dict[int, FinishedShard] = {}
        self.logs: dict[int, CaptureLog] = {}
        for number in range(shards):
            if (found := self._resume(number, part)) is not None:
                self.finished[number] = found
                self.provenance = self.provenance or found.provenance
            else:
                self.logs[number] = CaptureLog(log_path(self._scratch, number), part, self._states - 1)
        self._ids = {sample for found in self.finished.values() for sample in found.ids}

    def __contains__(self, sample: str) -> bool:
        return sample in self._ids or any(sample in log.samples for log in self.logs.values())

    def adopt(self, provenance: Provenance) -> None:
        """Set the provenance of this capture, or check that it has not changed.

        Raises:
            Eagle3Error: it has changed, for example by another version of the engine.
        """
        if self.provenance is None:
            write_provenance(self._scratch, provenance)
            self.provenance = provenance
        elif provenance != self.provenance:
            changed = [name for name, value in vars(provenance).items() if vars(self.provenance)[name] != value]
            raise Eagle3Error(
                "this capture was started with a different engine, whose states must not be mixed with this one's",
                where=self._folder,
                found={name: vars(provenance)[name] for name in changed},
                expected={name: vars(self.provenance)[name] for name in changed},
                remedy="go back to the earlier software, or delete this folder to recapture everything",
            )

    def finish(self, head: HeadWeights) -> None:
        """Turn the logs into shards: each is written, read back and renamed; then its log is deleted."""
        assert self.provenance is not None
        for number, log in sorted(self.logs.items()):
            samples = sorted(log.samples.values(), key=lambda stored: stored.id)
            samples = _with_teacher(samples, self.provenance, head)
            with atomic_write(shard_path(self._folder, number)) as temporary:
                write_shard(temporary, self.provenance, number, self._shards, samples)
                found = self._read_back(temporary)
            sync(self._folder)
            log.remove()
            self.finished[number] = found
        self.logs = {}

    def _resume(self, number: int, part: str) -> FinishedShard | None:
        path = shard_path(self._folder, number)
        if not path.exists():
            return None
        try:
            found = self._read_back(path)
        except Eagle3Error as error:
            console.say(f"{error}\n  its samples are captured again")
        else:
            if found.provenance.part == part:
                return found
        path.unlink()
        return None

    def _read_back(self, path: Path) -> FinishedShard:
        """Read every frame of a shard.

        Raises:
            Eagle3Error: the shard is damaged.
        """
        shard = Shard(path)
        statistics = Statistics.zero(self._states)
        disagreed = []
        for audit in audit_shard(shard, self._threads):
            if audit.faults or audit.stored is None or audit.statistics is None:
                fault = audit.faults[0]
                raise Eagle3Error(
                    "hidden states on the disk differ from what was written",
                    where=f"{path}, sample {fault.sample}",
                    found=fault.detail,
                    remedy="check the disk, then run again: damaged samples are captured again",
                )
            statistics += audit.statistics
            if audit.stored.next_token != audit.stored.teacher_token:
                disagreed.append(audit.stored.id)
        size = path.stat().st_size
        return FinishedShard(shard.provenance, shard.ids, int(shard.tokens.sum()), size, statistics, disagreed)

    def __enter__(self) -> CaptureState:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self.logs.values():
            log.close()


def _with_teacher(samples: Sequence[StoredSample], provenance: Provenance, head: HeadWeights) -> list[StoredSample]:
    """Return the samples with their teacher token, computed from their last row."""
    known: list[StoredSample] = []
    for start in range(0, len(samples), GROUP):
        group = samples[start : start + GROUP]
        rows = codec.bf16(np.stack([last_row(stored, provenance) for stored in group]))
        known += [
            replace(stored, teacher_token=int(token))
            for stored, token in zip(group, teacher_tokens(head, rows), strict=True)
        ]
    return known


def last_row(stored: StoredSample, provenance: Provenance) -> codec.Bits:
    """Return the last state at the last position, [H]."""
    frames = len(stored.checksums)
    rows = (len(stored.last_rows) - 1) % codec.FRAME_ROWS + 1
    target = np.empty((rows, provenance.hidden_size), np.uint16)
    decode_frames(stored, provenance, frames - 1, frames, [target])
    row: codec.Bits = target[-1]
    return row
