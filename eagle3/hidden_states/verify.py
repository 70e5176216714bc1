"""Verify stored hidden states: every byte, and, given the target or a second engine, the content of some samples.

Works on finished shards and on a running capture. Nothing is changed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.errors import Eagle3Error
from eagle3.hidden_states import codec
from eagle3.hidden_states.audit import Audit, Fault, Statistics, audit_sample, audit_shard
from eagle3.hidden_states.capture_log import FOLDER, read_provenance, scan
from eagle3.hidden_states.reader import load
from eagle3.hidden_states.shard import Shard
from eagle3.hidden_states.stored_sample import Provenance, StoredSample
from eagle3.hidden_states.teacher import is_tie, normed, teacher_tokens

Chosen = tuple[StoredSample, Provenance, codec.Bits]
"""A sample to check against the target, and its last state at the last position, [H]."""

if TYPE_CHECKING:
    import torch

    from eagle3.engines.base import Engine
    from eagle3.target.pin import Target
    from eagle3.target.weights import HeadWeights

# Engines in bf16 agree within 3% in deep layers, fp8 adds 3%; a wrong layer or row differs by 50% or more.
_PARITY_TOLERANCE = 0.15
# Rows per sample for which the teacher predicts the next token. If it is usually right on the other samples, a
# sample without a single hit is not a coincidence.
_RESPONSE_ROWS = 16
_USUALLY_RIGHT = 0.3


@dataclass
class Report:
    """The result of `verify`."""

    files: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of all frames."""
    teacher_agreement: float | None = None
    """Share of samples whose recorded teacher token is the engine's; None if nothing is recorded yet."""
    response_agreement: float | None = None
    """Share of checked rows for which the teacher's token is the response's; None if none were checked."""
    parity: dict[int, float] = field(default_factory=dict)
    """Layer -> median distance of a row from the second engine's, relative to its norm."""
    layers: list[dict[str, float]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass
class _AuditedFile:
    """The samples of one file, audited."""

    path: Path
    provenance: Provenance
    audits: list[Audit]
    shard: Shard | None = None


def verify(
    paths: Sequence[Path],
    *,
    target: Target | None = None,
    head: HeadWeights | None = None,
    engine: Engine | None = None,
    samples: int = 8,
    min_teacher_agreement: float = 0.9,
    threads: int = 2,
) -> Report:
    """Check every byte of shards, and a random few of their samples against the target.

    Args:
        paths: shards, or folders that hold them; also the work folder of a running capture.
        target: compare with the target that the shards name.
        head: the target's head: recompute the teacher tokens of some samples.
        engine: a second engine: recapture some samples and compare.
        samples: number of samples that are checked with `head` and `engine`.
        min_teacher_agreement: minimum share of samples on which teacher and engine agree.
        threads: number of threads for reading.

    Returns:
        the report; it lists damage, which is not raised.

    Raises:
        Eagle3Error: there is nothing to verify.
    """
    report = Report()
    sets = list(_read(_files(paths), report, threads))
    unreadable = len(report.faults)
    for one in sets:
        report.files += 1
        report.samples += len(one.audits)
        report.bytes += sum(audit.stored.size for audit in one.audits if audit.stored)
        for audit in one.audits:
            report.faults += audit.faults
            report.tokens += len(audit.stored.token_ids) if audit.stored else 0
    if sets:
        _check_belonging(sets, target, unreadable, report)
        _check_teacher(sets, min_teacher_agreement, report)
        report.layers = _statistics(sets)
    sound = [
        (audit.stored, one.provenance, audit.last_row)
        for one in sets
        for audit in one.audits
        if audit.stored is not None and audit.last_row is not None and not audit.faults
    ]
    chosen = random.Random(0).sample(sound, min(samples, len(sound)))
    if head is not None:
        _repeat_teacher(chosen, head, report)
    if engine is not None:
        _compare(chosen, engine, head, report)
    return report


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*.safetensors") if FOLDER not in file.parts)
            found += sorted(path.rglob(f"{FOLDER}/*.log"))
        else:
            found.append(path)
    if not found:
        raise Eagle3Error(
            "there are no hidden states to verify",
            where=", ".join(map(str, paths)),
            expected="shard-*.safetensors, or the work folder of a running capture",
        )
    return found


def _read(files: Sequence[Path], report: Report, threads: int) -> Iterator[_AuditedFile]:
    for path in files:
        if path.suffix == ".log":
            found = _read_log(path, threads)
            # A running capture may have turned it into a shard meanwhile.
            path = path if path.exists() else path.parent.with_name(f"{path.stem}.safetensors")
            if path.suffix == ".log":
                yield from found
                continue
        try:
            shard = Shard(path)
        except Eagle3Error as error:
            report.files += 1
            report.faults.append(Fault(_kind(error), str(path), "", _found(error)))
        else:
            yield _AuditedFile(path, shard.provenance, audit_shard(shard, threads), shard)


def _read_log(path: Path, threads: int) -> list[_AuditedFile]:
    provenance = read_provenance(path.parent)
    if provenance is None:
        return []
    with ThreadPoolExecutor(threads) as pool:
        return [
            _AuditedFile(
                path,
                provenance,
                list(pool.map(lambda stored: audit_sample(stored, provenance), scan(path, provenance.aux_layers))),
            )
        ]


def _kind(error: Eagle3Error) -> str:
    return next((name for name in ("truncated", "missing") if name in error.problem), "header")


def _found(error: Eagle3Error) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if "remedy:" not in line and "where:" not in line)


def _check_belonging(sets: Sequence[_AuditedFile], target: Target | None, unreadable: int, report: Report) -> None:
    """Check that the files belong to one capture of this target, and that all its shards are there."""
    first = sets[0]
    owner: dict[str, Path] = {}
    numbers: dict[str, set[int]] = defaultdict(set)
    for one in sets:
        for name, value in one.provenance.comparable().items():
            if (expected := first.provenance.comparable()[name]) != value:
                detail = f"{name} is {value}, but {expected} in {first.path}"
                report.faults.append(Fault("mixed", str(one.path), "", detail))
        if target is not None and one.provenance.target_revision != target.revision:
            detail = f"captured from revision {one.provenance.target_revision}, but the target is {target.revision}"
            report.faults.append(Fault("target", str(one.path), "", detail))
        for audit in one.audits:
            if audit.stored and (other := owner.setdefault(audit.stored.id, one.path)) != one.path:
                report.faults.append(Fault("duplicate", str(one.path), audit.stored.id, f"also in {other}"))
        if one.shard is not None:
            numbers[one.provenance.part].add(one.shard.number)
    for one in sets:
        if one.shard is None:
            continue
        missing = sorted(set(range(one.shard.shards)) - numbers[one.provenance.part])
        # While a capture runs, unfinished shards are logs.
        logs = sum(other.shard is None and other.provenance.part == one.provenance.part for other in sets)
        if len(missing) > unreadable + logs:
            detail = f"of {one.shard.shards} shards of this capture, these are missing: {missing}"
            report.faults.append(Fault("incomplete", str(one.path), "", detail))


def _check_teacher(sets: Sequence[_AuditedFile], minimum: float, report: Report) -> None:
    samples = [audit.stored for one in sets if one.shard for audit in one.audits if audit.stored]
    disagreed = [stored.id for stored in samples if stored.teacher_token != stored.next_token]
    if not samples:
        return
    report.teacher_agreement = 1 - len(disagreed) / len(samples)
    if report.teacher_agreement < minimum:
        detail = f"teacher and engine agree on {report.teacher_agreement:.1%} of the samples, {minimum:.1%} expected"
        report.faults.append(Fault("teacher", str(sets[0].path), ", ".join(disagreed[:5]), detail))


def _statistics(sets: Sequence[_AuditedFile]) -> list[dict[str, float]]:
    layer_ids = sets[0].provenance.layer_ids
    audits = [audit for one in sets if one.provenance.layer_ids == layer_ids for audit in one.audits]
    found = [audit.statistics for audit in audits if audit.statistics is not None]
    return sum(found, Statistics.zero(len(layer_ids))).rows(layer_ids)


def _repeat_teacher(chosen: Sequence[Chosen], head: HeadWeights, report: Report) -> None:
    """Recompute teacher tokens, at the last position and in the response."""
    import torch

    matches: list[tuple[StoredSample, list[bool]]] = []
    for stored, provenance, last_row in chosen:
        last = load(stored, provenance).last
        picked = np.linspace(0, len(last) - 1, min(_RESPONSE_ROWS, len(last))).astype(np.int64)
        states = torch.cat([last[torch.from_numpy(picked)], codec.bf16(last_row[None])])
        *predicted, final = teacher_tokens(head, states).tolist()
        following = stored.token_ids[stored.last_rows[picked] + 1].tolist()
        matches.append((stored, [one == other for one, other in zip(predicted, following, strict=True)]))
        if stored.teacher_token not in (-1, final) and not is_tie(head, states[-1], final, stored.teacher_token):
            detail = f"the last state leads to token {final}, but {stored.teacher_token} is recorded"
            report.faults.append(Fault("teacher", str(stored.path), stored.id, detail))
    checked = sum(len(found) for _, found in matches)
    if not checked:
        return
    report.response_agreement = sum(sum(found) for _, found in matches) / checked
    for stored, found in matches:
        if report.response_agreement > _USUALLY_RIGHT and len(found) == _RESPONSE_ROWS and not any(found):
            detail = f"none of {_RESPONSE_ROWS} states leads to the next token: do they belong to another sample?"
            report.faults.append(Fault("response", str(stored.path), stored.id, detail))


def _compare(chosen: Sequence[Chosen], engine: Engine, head: HeadWeights | None, report: Report) -> None:
    """Recapture samples with another engine."""
    distances: dict[int, list[float]] = defaultdict(list)
    by_layers: dict[tuple[int, ...], list[tuple[StoredSample, Provenance]]] = defaultdict(list)
    for stored, provenance, _ in chosen:
        by_layers[provenance.layer_ids].append((stored, provenance))
    for layer_ids, group in by_layers.items():
        captured = engine.capture([stored.token_ids.tolist() for stored, _ in group], layer_ids)
        states = {np.array(one.token_ids, "<i4").tobytes(): one.states.float().cpu() for one in captured}
        for stored, provenance in group:
            reference = states[stored.token_ids.tobytes()]  # [n, L, H]
            loaded = load(stored, provenance)
            for index, layer in enumerate(layer_ids):
                rows = slice(None) if index < provenance.aux_layers else loaded.last_rows
                mine = (loaded.aux[:, index] if index < provenance.aux_layers else loaded.last).float()
                if not len(mine):
                    continue
                distances[layer].append(_distance(mine, reference[:, index][rows]))
                if distances[layer][-1] > _PARITY_TOLERANCE:
                    detail = f"layer {layer} differs by {distances[layer][-1]:.0%} from {engine.name}'s"
                    detail += _likeness(mine, reference, rows, layer_ids, head)
                    report.faults.append(Fault("parity", str(stored.path), stored.id, detail))
    report.parity = {layer: float(np.median(found)) for layer, found in sorted(distances.items())}


def _likeness(
    mine: torch.Tensor, reference: torch.Tensor, rows: Any, layer_ids: Sequence[int], head: HeadWeights | None
) -> str:
    """Describe what states [t, H] equal instead, if that is a common mistake of engines; else return ""."""
    for index, layer in enumerate(layer_ids):
        states = reference[:, index]  # [n, H]
        candidates = {f"layer {layer}": states}
        candidates |= {f"layer {layer} with rows shifted by {by}": states.roll(by, 0) for by in (1, -1)}
        if head is not None:
            candidates[f"layer {layer} after the final norm"] = normed(head, states)
        for name, candidate in candidates.items():
            if _distance(mine, candidate[rows]) < _PARITY_TOLERANCE:
                return f"; it equals {name}"
    return ""


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the median over rows [t, H] of |one - other| / |other|."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)).median())
