"""Verify stored hidden states: everything that a file can say about itself, and, with a target or an engine, more.

Works on finished shards and on a capture that still runs. Nothing is changed.
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
"""A sample to look at again, and its last state at the last position, [H]."""

if TYPE_CHECKING:
    import torch

    from eagle3.engines.base import Engine
    from eagle3.target.pin import Target
    from eagle3.target.weights import HeadWeights

# Engines in bf16 agree to 3% in deep layers, fp8 adds 3%; another layer or row is off by 50% and more.
_PARITY_TOLERANCE = 0.15
# Rows of one sample that the teacher predicts again. Where it is usually right, so many misses are no chance.
_RESPONSE_ROWS = 16
_USUAL = 0.3


@dataclass
class Report:
    """What `verify` found."""

    files: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of all frames."""
    teacher_agreement: float | None = None
    """Share of samples whose recorded teacher token is the engine's; None where nothing is recorded yet."""
    response_agreement: float | None = None
    """Share of looked-at rows where the teacher's choice is the token that the response has."""
    parity: dict[int, float] = field(default_factory=dict)
    """Layer -> median distance of a row from the second engine's, relative to its length."""
    layers: list[dict[str, float]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass
class _Set:
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
        target: compare what the shards say of it.
        head: the target's head: compute the teacher tokens of some samples again.
        engine: a second engine: capture some samples again and compare.
        samples: how many samples `head` and `engine` look at.
        min_teacher_agreement: smallest share of samples on which teacher and engine agree.
        threads: for reading.

    Returns:
        the report; damage is listed in it and not raised.

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


def _read(files: Sequence[Path], report: Report, threads: int) -> Iterator[_Set]:
    for path in files:
        if path.suffix == ".log":
            found = _read_log(path, threads)
            # A running capture may have made a shard of it meanwhile.
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
            yield _Set(path, shard.provenance, audit_shard(shard, threads), shard)


def _read_log(path: Path, threads: int) -> list[_Set]:
    provenance = read_provenance(path.parent)
    if provenance is None:
        return []
    with ThreadPoolExecutor(threads) as pool:
        return [
            _Set(
                path,
                provenance,
                list(pool.map(lambda stored: audit_sample(stored, provenance), scan(path, provenance.aux_layers))),
            )
        ]


def _kind(error: Eagle3Error) -> str:
    return next((name for name in ("truncated", "missing") if name in error.problem), "header")


def _found(error: Eagle3Error) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if "remedy:" not in line and "where:" not in line)


def _check_belonging(sets: Sequence[_Set], target: Target | None, unreadable: int, report: Report) -> None:
    """Whether the files are those of one run, all of them but the unreadable, and of this target."""
    first = sets[0]
    owner: dict[str, Path] = {}
    numbers: dict[str, set[int]] = defaultdict(set)
    for one in sets:
        for name, value in one.provenance.comparable().items():
            if (expected := first.provenance.comparable()[name]) != value:
                detail = f"{name} is {value}, but {expected} in {first.path}"
                report.faults.append(Fault("mixed", str(one.path), "", detail))
        if target is not None and one.provenance.target_revision != target.revision:
            detail = f"captured of revision {one.provenance.target_revision}, the target is {target.revision}"
            report.faults.append(Fault("target", str(one.path), "", detail))
        for audit in one.audits:
            if audit.stored and (other := owner.setdefault(audit.stored.id, one.path)) != one.path:
                report.faults.append(Fault("twice", str(one.path), audit.stored.id, f"also in {other}"))
        if one.shard is not None:
            numbers[one.provenance.part].add(one.shard.number)
    for one in sets:
        if one.shard is None:
            continue
        lacking = sorted(set(range(one.shard.shards)) - numbers[one.provenance.part])
        # While a capture runs, the shards to come are logs.
        logs = sum(other.shard is None and other.provenance.part == one.provenance.part for other in sets)
        if len(lacking) > unreadable + logs:
            detail = f"of {one.shard.shards} shards of this capture, these are not here: {lacking}"
            report.faults.append(Fault("incomplete", str(one.path), "", detail))


def _check_teacher(sets: Sequence[_Set], minimum: float, report: Report) -> None:
    samples = [audit.stored for one in sets if one.shard for audit in one.audits if audit.stored]
    disagreed = [stored.id for stored in samples if stored.teacher_token != stored.next_token]
    if not samples:
        return
    report.teacher_agreement = 1 - len(disagreed) / len(samples)
    if report.teacher_agreement < minimum:
        detail = f"teacher and engine agree on {report.teacher_agreement:.1%} of the samples, {minimum:.1%} expected"
        report.faults.append(Fault("teacher", str(sets[0].path), ", ".join(disagreed[:5]), detail))


def _statistics(sets: Sequence[_Set]) -> list[dict[str, float]]:
    layer_ids = sets[0].provenance.layer_ids
    audits = [audit for one in sets if one.provenance.layer_ids == layer_ids for audit in one.audits]
    found = [audit.statistics for audit in audits if audit.statistics is not None]
    return sum(found, Statistics.zero(len(layer_ids))).rows(layer_ids)


def _repeat_teacher(chosen: Sequence[Chosen], head: HeadWeights, report: Report) -> None:
    """Compute teacher tokens again, at the last position and in the response."""
    import torch

    matches: list[tuple[StoredSample, list[bool]]] = []
    for stored, provenance, last_row in chosen:
        last = load(stored, provenance).last
        picked = np.linspace(0, len(last) - 1, min(_RESPONSE_ROWS, len(last))).astype(np.int64)
        states = torch.cat([last[torch.from_numpy(picked)], codec.bf16(last_row[None])])
        *said, final = teacher_tokens(head, states).tolist()
        following = stored.token_ids[stored.last_rows[picked] + 1].tolist()
        matches.append((stored, [one == other for one, other in zip(said, following, strict=True)]))
        if stored.teacher_token not in (-1, final) and not is_tie(head, states[-1], final, stored.teacher_token):
            detail = f"the last state leads to token {final}, recorded is {stored.teacher_token}"
            report.faults.append(Fault("teacher", str(stored.path), stored.id, detail))
    looked_at = sum(len(found) for _, found in matches)
    if not looked_at:
        return
    report.response_agreement = sum(sum(found) for _, found in matches) / looked_at
    for stored, found in matches:
        if report.response_agreement > _USUAL and len(found) == _RESPONSE_ROWS and not any(found):
            detail = f"not one of {_RESPONSE_ROWS} states leads to the token that follows: are they another sample's?"
            report.faults.append(Fault("response", str(stored.path), stored.id, detail))


def _compare(chosen: Sequence[Chosen], engine: Engine, head: HeadWeights | None, report: Report) -> None:
    """Capture samples again by another engine."""
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
                    detail = f"layer {layer} is {distances[layer][-1]:.0%} off {engine.name}'s"
                    detail += _likeness(mine, reference, rows, layer_ids, head)
                    report.faults.append(Fault("parity", str(stored.path), stored.id, detail))
    report.parity = {layer: float(np.median(found)) for layer, found in sorted(distances.items())}


def _likeness(
    mine: torch.Tensor, reference: torch.Tensor, rows: Any, layer_ids: Sequence[int], head: HeadWeights | None
) -> str:
    """Say what states [t, H] look like instead, if it is something that engines get wrong."""
    for index, layer in enumerate(layer_ids):
        states = reference[:, index]  # [n, H]
        candidates = {f"layer {layer}": states}
        candidates |= {f"layer {layer} with rows shifted by {by}": states.roll(by, 0) for by in (1, -1)}
        if head is not None:
            candidates[f"layer {layer} after the final norm"] = normed(head, states)
        for name, candidate in candidates.items():
            if _distance(mine, candidate[rows]) < _PARITY_TOLERANCE:
                return f"; it is {name}"
    return ""


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the median over rows [t, H] of |one - other| / |other|."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)).median())
