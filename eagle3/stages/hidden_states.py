"""Capture the target's hidden states for every sample, into verified shards.

A sample is compressed and appended to a log at once (`capture_log`), so a kill costs only the samples in flight. When
all samples are captured, each shard is written once and read back in full; only then does it get its name and replace
its log (`capture_state`). Disk space needed: the result and one more shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3 import console
from eagle3.engines.base import Capture, Engine, open_engine
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import hash_of, range_of, sha256
from eagle3.files.records import Record, read_records, write_json
from eagle3.hidden_states import codec
from eagle3.hidden_states.audit import Statistics
from eagle3.hidden_states.capture_state import CaptureState
from eagle3.hidden_states.stored_sample import Int32s, Provenance
from eagle3.hidden_states.teacher import TeacherCheck, disagreement
from eagle3.hidden_states.writer import CaptureSample, CaptureWriter
from eagle3.target.pin import Target, load_target
from eagle3.target.weights import head_weights

if TYPE_CHECKING:
    from eagle3.config.engine import EngineSettings
    from eagle3.config.hidden_states import HiddenStatesSettings
    from eagle3.config.machine import MachineSettings

ATTEMPTS = 2


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence, and its samples (identical prompts can have identical answers)."""

    token_ids: Int32s
    samples: list[CaptureSample] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """Why a sample has no states."""

    reason: str
    detail: str


def make(
    settings: HiddenStatesSettings,
    engine: EngineSettings,
    machine: MachineSettings,
    *,
    target: Path,
    samples: Path,
    folder: Path,
) -> dict[str, Any]:
    """Capture the hidden states of every sample.

    Args:
        settings: which layers, how they are stored.
        engine: what runs the target.
        machine: threads, and memory for states in flight.
        target: `target.json`.
        samples: records with `id`, `input_ids` and `spans`.
        folder: the work folder; `shard-{i}.safetensors` and `stats.json` are written there.

    Returns:
        counts: samples, tokens, failed samples by reason, agreement, bytes.

    Raises:
        Eagle3Error: the engine's states disagree with its tokens; too many samples failed; there is nothing to capture.
    """
    pinned = load_target(target)
    layer_ids = _layer_ids(settings, pinned)
    sequences = read_samples(samples, settings.shards, pinned.vocab_size)
    part = hash_of(pinned.revision, layer_ids, settings.encoding, settings.shards, engine, sha256(samples))
    head = head_weights(pinned)
    with CaptureState(folder, part=part, shards=settings.shards, layer_ids=layer_ids, threads=machine.threads) as state:
        check = TeacherCheck(head, settings.min_teacher_agreement)
        run = _Run(pinned, part, layer_ids, settings, machine, state, check)
        run.capture_missing(sequences, engine, folder)
        failures = run.failed(sequences)
        state.finish(head)
        stats = _stats(state, sequences, failures, settings)
    write_json(folder / "stats.json", stats)
    return {name: value for name, value in stats.items() if name not in ("layers", "failures", "disagreed")}


def read_samples(path: Path, shards: int, vocab_size: int) -> list[TokenSequence]:
    """Return the sequences to capture, longest first: if memory is short, that shows at once.

    Raises:
        Eagle3Error: there are no samples, or one is invalid or a duplicate.
    """
    found: dict[bytes, TokenSequence] = {}
    seen: set[str] = set()
    for record in read_records(path):
        sample = _sample(record, shards, vocab_size, path)
        if sample.id in seen:
            raise Eagle3Error("duplicate sample id", where=f"{path}, sample {sample.id}")
        seen.add(sample.id)
        found.setdefault(sample.token_ids.tobytes(), TokenSequence(sample.token_ids)).samples.append(sample)
    if not found:
        raise Eagle3Error(
            "there are no samples to capture hidden states of",
            where=path,
            remedy="see the rejects of the samples stage for the reasons",
        )
    return sorted(found.values(), key=lambda sequence: (-len(sequence.token_ids), sequence.samples[0].id))


def _sample(record: Record, shards: int, vocab_size: int, path: Path) -> CaptureSample:
    n = len(record["input_ids"])
    token_ids = np.array(record["input_ids"], "<i4")
    spans = record["spans"]
    if not n or not (0 <= token_ids.min() <= token_ids.max() < vocab_size):
        raise Eagle3Error(
            "a sample's tokens are not in the target's vocabulary",
            where=f"{path}, sample {record['id']}",
            expected=f"one or more ids in [0, {vocab_size:,})",
        )
    if any(not 0 <= start < end <= n for start, end in spans):
        raise Eagle3Error(
            "a sample's spans are outside its tokens", where=f"{path}, sample {record['id']}", found=spans
        )
    # Stored for a span [s, e): rows s-1 .. e-2. Which of them a loss reads: `draft.data.packing.supervised_roots`.
    rows = [np.arange(max(0, start - 1), end - 1) for start, end in spans]
    last_rows = np.unique(np.concatenate([*rows, [n - 1]])).astype("<i4")
    return CaptureSample(record["id"], token_ids, last_rows, range_of(hash_of("shard", record["id"]), shards))


def _layer_ids(settings: HiddenStatesSettings, target: Target) -> tuple[int, ...]:
    aux = settings.aux_layer_ids or target.aux_layer_ids
    if list(aux) != sorted(set(aux)) or aux[0] < 0 or aux[-1] >= target.num_layers:
        raise Eagle3Error(
            "the auxiliary layers are not layers of the target",
            where="hidden_states.aux_layer_ids",
            found=list(aux),
            expected=f"ascending, from 0 to {target.num_layers - 1}",
        )
    return (*aux, target.num_layers)


@dataclass(frozen=True)
class _Run:
    """A running capture."""

    target: Target
    part: str
    layer_ids: tuple[int, ...]
    settings: HiddenStatesSettings
    machine: MachineSettings
    state: CaptureState
    check: TeacherCheck
    failures: dict[str, Failure] = field(default_factory=dict)

    def missing(self, sequence: TokenSequence) -> list[CaptureSample]:
        """Return the samples of a sequence that have no states yet."""
        return [sample for sample in sequence.samples if sample.id not in self.state]

    def capture_missing(self, sequences: Sequence[TokenSequence], settings: EngineSettings, folder: Path) -> None:
        """Run the engine on all sequences without states; failed ones are tried once more."""
        tokens = sum(len(one.token_ids) for one in sequences)
        missing = sum(len(one.token_ids) for one in sequences if self.missing(one))
        if not missing:
            return
        with (
            open_engine(settings, self.machine, self.target, folder) as engine,
            console.Progress(tokens, "hidden states", "tokens") as bar,
        ):
            bar.update(tokens - missing)
            for _ in range(ATTEMPTS):
                with CaptureWriter(
                    self.state.logs, threads=self.machine.threads, limit=self.machine.buffer_mb << 20
                ) as writer:
                    for unit in self._units(sequences, engine.batch_size):
                        for tokens in self._capture(engine, unit, writer):
                            bar.update(tokens)
                    writer.drain()
            self.check.flush()

    def _units(self, sequences: Sequence[TokenSequence], batch_size: int | None) -> Iterator[Sequence[TokenSequence]]:
        """Yield the sequences of one call of the engine at a time.

        If rounding depends on the batch, batches are the same in every run, and one with a missing sample is computed
        as a whole.
        """
        if batch_size is None:
            if missing := [one for one in sequences if self.missing(one)]:
                yield missing
            return
        for start in range(0, len(sequences), batch_size):
            batch = sequences[start : start + batch_size]
            if any(self.missing(one) for one in batch):
                yield batch

    def _capture(self, engine: Engine, unit: Sequence[TokenSequence], writer: CaptureWriter) -> Iterator[int]:
        """Capture one unit; yield the number of tokens of each newly captured sequence."""
        asked = {one.token_ids.tobytes(): one for one in unit}
        for capture in engine.capture([one.token_ids.tolist() for one in unit], self.layer_ids):
            one = asked.pop(np.array(capture.token_ids, "<i4").tobytes(), None)
            missing = self.missing(one) if one else []
            if not missing:
                continue
            states = self._states_of(capture)
            if isinstance(states, Failure):
                self.failures.update({sample.id: states for sample in missing})
                continue
            provenance = self._provenance(engine, capture)
            for sample in missing:
                writer.submit(sample, states, capture.next_token, provenance)
                self.check.add(sample.id, states[-1, -1], capture.next_token)
            yield len(states)
        for one in asked.values():
            for sample in self.missing(one):
                self.failures[sample.id] = Failure("not returned", "the engine returned no states for these tokens")

    def _states_of(self, capture: Capture) -> codec.Bits | Failure:
        """Return the states [n, L, H] as bf16, or why they are unusable."""
        import torch

        states = capture.states
        shape = (len(capture.token_ids), len(self.layer_ids), self.target.hidden_size)
        if len(states) != shape[0]:
            return Failure("rows", f"{len(states)} rows for {shape[0]} tokens")
        if tuple(states.shape) != shape:
            return Failure("shape", f"{tuple(states.shape)}, expected {shape}")
        if states.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return Failure("dtype", f"{states.dtype} where a floating-point type of 16 or 32 bits is expected")
        bits = codec.bits(states.to("cpu", torch.bfloat16).contiguous())
        for start in range(0, len(bits), codec.FRAME_ROWS):
            if (bits[start : start + codec.FRAME_ROWS] & 0x7F80 == 0x7F80).any():
                return Failure("not finite", f"between rows {start} and {start + codec.FRAME_ROWS - 1}")
        return bits

    def failed(self, sequences: Sequence[TokenSequence]) -> dict[str, Failure]:
        """Return the samples without states, by id, and why.

        Raises:
            Eagle3Error: they are more than the settings allow.
        """
        missing = sorted(sample.id for one in sequences for sample in self.missing(one))
        failures = {sample: self.failures[sample] for sample in missing}
        total = sum(len(one.samples) for one in sequences)
        if len(failures) > self.settings.max_failed * total or len(failures) == total:
            named = [f"{sample} ({failure.reason}: {failure.detail})" for sample, failure in failures.items()]
            raise Eagle3Error(
                "too many samples could not be captured",
                where="; ".join(named[:5]) + ("; ..." if len(named) > 5 else ""),
                found=f"{len(failures):,} of {total:,} after {ATTEMPTS} attempts",
                expected=f"at most {self.settings.max_failed:.1%} (hidden_states.max_failed)",
                remedy="see the engine's log; captured samples are kept, and the next run resumes",
            )
        return failures

    def _provenance(self, engine: Engine, capture: Capture) -> Provenance:
        provenance = Provenance(
            part=self.part,
            target_revision=self.target.revision,
            layer_ids=self.layer_ids,
            hidden_size=self.target.hidden_size,
            encoding=self.settings.encoding,
            engine=engine.name,
            engine_dtype=str(capture.states.dtype).removeprefix("torch."),
            versions=dict(engine.versions),
        )
        self.state.adopt(provenance)
        return provenance


def _stats(
    state: CaptureState,
    sequences: Sequence[TokenSequence],
    failures: dict[str, Failure],
    settings: HiddenStatesSettings,
) -> dict[str, Any]:
    """Return the content of `stats.json`, from the finished shards.

    Raises:
        Eagle3Error: teacher and engine agree too rarely.
    """
    finished = [state.finished[number] for number in range(settings.shards)]
    assert state.provenance is not None
    samples = sum(len(one.samples) for one in sequences)
    stored = sum(len(found.ids) for found in finished)
    assert stored + len(failures) == samples
    disagreed = sorted(sample for found in finished for sample in found.disagreed)
    agreement = 1 - len(disagreed) / stored
    if agreement < settings.min_teacher_agreement:
        raise disagreement(agreement, stored, settings.min_teacher_agreement, disagreed)
    statistics = sum((found.statistics for found in finished), Statistics.zero(len(state.provenance.layer_ids)))
    plain = 2 * int(statistics.values.sum())
    size = sum(found.bytes for found in finished)
    return {
        "samples": samples,
        "sequences": len(sequences),
        "stored": stored,
        "failed": dict(sorted(Counter(failure.reason for failure in failures.values()).items())),
        "tokens": sum(found.tokens for found in finished),
        "bytes": size,
        "share_of_bf16": size / plain,
        "teacher_agreement": agreement,
        "engine_dtype": state.provenance.engine_dtype,
        "layers": statistics.rows(state.provenance.layer_ids),
        "disagreed": disagreed,
        "failures": [{"id": sample, **vars(failure)} for sample, failure in failures.items()],
    }
