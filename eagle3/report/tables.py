"""The tables of the report: names and figures from the stages' JSON files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.files.records import Record
from eagle3.report.pages import Rows, grid


def draft(measured: Mapping[str, Record]) -> Rows:
    """Return the main figures: acceptance length and speed, from each kind of measurement."""
    rows: dict[str, Any] = {}
    for kind, found in measured.items():
        rows[f"acceptance length, {kind}"] = found["acceptance_length"]
        rows[f"verification steps, {kind}"] = found["steps"]
        if "on_served_prompts" in found:
            on_served = found["on_served_prompts"]
            rows[f"acceptance length, {kind}, on the served prompts"] = on_served["acceptance_length"]
    if served := measured.get("served"):
        speed, pace = served["tokens_per_second"], served["milliseconds_per_token"]
        rows["prompts served"] = served["prompts"]
        rows["engine"] = _engine(served["engine"])
        rows["tokens/s with the draft"] = speed["with_draft"]
        rows["tokens/s without"] = speed["without_draft"]
        rows["speed-up"] = speed["with_draft"] / speed["without_draft"]
        rows["ms per token with the draft"] = pace["with_draft"]
        rows["ms per token without"] = pace["without_draft"]
        rows["identical answers with and without the draft"] = served["identical_outputs"]
    if sampled := measured.get("sampled"):
        rows["temperature, sampled"] = sampled["temperature"]
    return rows


def training(metrics: Record) -> Rows:
    """Return the figures of the training run, from the draft stage's `metrics.json`."""
    return {
        "optimiser steps": metrics["steps"],
        "skipped steps (gradient norm not finite or too large)": metrics["skipped_steps"],
        "held-out acceptance length of the final weights": metrics["acceptance_length"],
        "expected from the acceptance by position": metrics["expected_acceptance_length"],
    }


def data(samples: Sequence[Record], dataset: Record, vocabulary: Record) -> Rows:
    """Return the figures of the training data, summed over all parts."""
    rows, kept = (sum(part["total"][name] for part in samples) for name in ("rows", "samples"))
    total = dataset["total"]
    tokens, supervised = total.get("train tokens"), total.get("train supervised tokens")
    return {
        "generations rejected": rows - kept + sum(total["rejects"].values()),
        "training samples": total.get("train samples"),
        "training tokens": tokens,
        "supervised tokens (answers)": supervised,
        "supervised share": supervised / tokens if tokens else None,
        "samples with provided answers (off-policy)": sum(part["total"].get("off_policy", 0) for part in samples),
        "held-out samples": total.get("eval samples"),
        "draft vocabulary": vocabulary["size"],
        "draft vocabulary's coverage of the answers": vocabulary["coverage"],
    }


def hidden_states(parts: Sequence[Record]) -> Rows:
    """Return the figures of the captured hidden states, summed over all parts."""
    stored = sum(part["stored"] for part in parts)
    agreed = sum(part["teacher_agreement"] * part["stored"] for part in parts)
    return {
        "samples captured": stored,
        "samples that could not be captured": sum(sum(part["failed"].values()) for part in parts),
        "agreement with the engine's own next token": agreed / stored if stored else None,
        "size (GB)": sum(part["bytes"] for part in parts) / 1e9,
    }


def sources(prompts: Record, samples: Sequence[Record], dataset: Record, vocabulary: Record) -> str:
    """Return a table with a row per source: what became of its rows, and how well the draft vocabulary covers it."""
    rows = []
    for name, read in prompts["sources"].items():
        made: Counter[str] = Counter()
        for part in samples:
            made.update({k: v for k, v in part["sources"].get(name, {}).items() if k != "rejects"})
        kept = dataset["sources"].get(name, {})
        rows.append(
            (
                name,
                read["rows"],
                read.get("prompts", 0),
                made["rows"],
                kept.get("train samples", 0),
                kept.get("eval samples", 0),
                made["off_policy"],
                made["tokens"],
                made["generated"] / made["tokens"] if made["tokens"] else None,
                vocabulary["sources"].get(name),
            )
        )
    headings = ("rows", "prompts", "answers", "training", "held out", "off-policy", "tokens", "supervised", "covered")
    return grid("Sources", headings, rows) if rows else ""


def reasons(prompts: Record, samples: Sequence[Record], dataset: Record) -> str:
    """Return a table of what was rejected: reasons in rows, sources in columns."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for stage, parts in (("prompts", [prompts]), ("samples", samples), ("dataset", [dataset])):
        for part in parts:
            for source, found in part["sources"].items():
                for reason, count in found["rejects"].items():
                    counts[stage, reason][source] += count
    if not counts:
        return ""
    names = sorted({source for found in counts.values() for source in found})
    rows = [
        (f"{stage}: {reason}", *(found[name] or None for name in names), found.total())
        for (stage, reason), found in counts.items()
    ]
    return grid("Rejected, by stage and reason", (*names, "total"), rows)


def _engine(identity: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in identity.items() if name != "name")
    return f"{identity['name']} ({versions})"
