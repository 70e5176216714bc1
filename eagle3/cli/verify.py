"""`eagle3 verify`: verify stored hidden states and print what was found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from eagle3 import console
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import open_engine
from eagle3.errors import Eagle3Error
from eagle3.hidden_states.verify import Report, verify
from eagle3.target.pin import load_target
from eagle3.target.weights import head_weights


def verify_files(paths: Sequence[Path], *, pin: Path | None, parity: bool, samples: int, threads: int) -> Report:
    """Verify shards; with a pinned target also their content, with `parity` against transformers.

    Raises:
        Eagle3Error: there is nothing to verify, or `parity` has no target.
    """
    if pin is None:
        if parity:
            raise Eagle3Error("parity needs the target", remedy="add --target results/<run>/target/target.json")
        return verify(paths, threads=threads)
    target = load_target(pin)
    with ExitStack() as stack:
        engine = None
        if parity:
            machine = MachineSettings(threads=threads)
            engine = stack.enter_context(open_engine(EngineSettings(batch_size=4), machine, target))
        return verify(paths, target=target, head=head_weights(target), engine=engine, samples=samples, threads=threads)


def print_report(report: Report) -> None:
    """Print counts, one line per layer, and every fault."""
    console.summary(
        "hidden states",
        {
            "files": report.files,
            "samples": report.samples,
            "tokens": report.tokens,
            "size": console.size(report.bytes),
            "teacher agreement": report.teacher_agreement if report.teacher_agreement is not None else "not recorded",
            "response agreement": report.response_agreement if report.response_agreement is not None else "not checked",
            **{f"parity, layer {layer}": distance for layer, distance in report.parity.items()},
        },
    )
    headings = ("layer", "RMS", "largest", "share of bf16", "exponents' share")
    console.table("per layer", [tuple(row.values()) for row in report.layers], headings)
    if report.faults:
        rows = [(fault.check, fault.file, fault.sample, fault.detail) for fault in report.faults]
        console.table("faults", rows, ("check", "file", "sample", "what"))
        console.fail(f"{len(report.faults)} faults: delete these files and run snakemake again")
    else:
        console.say("no faults")
