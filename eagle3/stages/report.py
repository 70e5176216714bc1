"""Report: what a run found, as figures, tables and a few samples, for `snakemake --report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import orjson
from matplotlib.figure import Figure

from eagle3.chat.roles import Roles
from eagle3.chat.template import load_chat
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_json
from eagle3.report import figures, pages
from eagle3.report.pages import Rows
from eagle3.target.pin import load_target

# The files that `make` writes, whatever its inputs hold; each figure has a caption in workflow/report/.
FIGURES = ("training", "acceptance_positions", "acceptance_sources", "lengths", "rejects", "coverage")
SUMMARY = "summary.html"
SAMPLES = "samples.html"


def make(
    *,
    target: Path,
    train: Path,
    training_log: Path,
    draft_metrics: Path,
    acceptance: Sequence[Path],
    prompts_stats: Path,
    samples_stats: Sequence[Path],
    dataset_stats: Path,
    vocabulary_stats: Path,
    hidden_states_stats: Sequence[Path],
    folder: Path,
) -> dict[str, Any]:
    """Write one SVG per name in `FIGURES`, `summary.html` and `samples.html` into `folder`.

    A source without figures (held-out prompts of that source were not served, say) is left out of the figure
    concerned; a figure without anything to draw says so. The same inputs give the same bytes.

    Args:
        target: `target.json`.
        train: the training samples, of which a few are shown.
        training_log: `log.jsonl` of the draft stage.
        draft_metrics: `metrics.json` of the draft stage.
        acceptance: every `acceptance.json`, simulated and served.
        prompts_stats: `stats.json` of the prompts stage.
        samples_stats: `stats.json` of the samples stage, one per part.
        dataset_stats: `stats.json` of the dataset stage.
        vocabulary_stats: `stats.json` of the vocabulary stage.
        hidden_states_stats: `stats.json` of the hidden-state stage, one per part.
        folder: where to work.

    Returns:
        the main figures.

    Raises:
        Eagle3Error: an input is missing or damaged.
    """
    measured = _measured([read_json(path) for path in acceptance])
    samples = [read_json(path) for path in samples_stats]
    vocabulary = read_json(vocabulary_stats)
    prompts, dataset = read_json(prompts_stats), read_json(dataset_stats)
    _draw(_read_log(training_log), measured, samples, dataset, vocabulary, folder)
    sections = {
        "Draft": _draft_rows(measured),
        "Training": _training_rows(read_json(draft_metrics)),
        "Data": _data_rows(samples, dataset, vocabulary),
        "Hidden states": _state_rows([read_json(path) for path in hidden_states_stats]),
    }
    tables = [pages.table(title, rows) for title, rows in sections.items() if rows]
    tables += [pages.sources(prompts, samples, dataset, vocabulary), pages.reasons(prompts, samples, dataset)]
    pages.write(folder / SUMMARY, "Summary", *tables)
    pages.write(folder / SAMPLES, "Samples", *pages.samples(train, Roles(load_chat(load_target(target)))))
    return {"figures": len(FIGURES), **sections["Draft"]}


def _measured(acceptance: Sequence[Record]) -> dict[str, Record]:
    """Return the figures by kind of measurement; what was served at a temperature is a kind of its own."""
    measured = {found["kind"]: found for found in acceptance}
    if sampled := measured.get("served", {}).get("sampled"):
        measured["sampled"] = sampled
    return measured


def _draw(
    log: Sequence[Record],
    measured: Mapping[str, Record],
    samples: Sequence[Record],
    dataset: Record,
    vocabulary: Record,
    folder: Path,
) -> None:
    with mpl.rc_context(figures.STYLE):
        drawn = {
            "training": _training(log),
            **_acceptance(measured),
            **_samples(samples, dataset),
            "coverage": figures.coverage(vocabulary["size"], vocabulary["coverage"], vocabulary["sources"]),
        }
        for name in FIGURES:
            figures.save(drawn[name], folder / f"{name}.svg")


def _read_log(path: Path) -> list[Record]:
    try:
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, orjson.JSONDecodeError) as error:
        raise Eagle3Error("a training log cannot be read", where=path, found=error) from None


def _training(log: Sequence[Record]) -> Figure:
    lines = [record for record in log if record["kind"] == "train"]
    return figures.training(
        [line["step"] for line in lines],
        [line["loss"] for line in lines],
        [line["conditional"] for line in lines],
        _evaluations(log),
        [line["grad_norm"] for line in lines],
        [line["learning_rate"] for line in lines],
        [line["skipped_steps"] for line in lines],
    )


def _evaluations(log: Sequence[Record]) -> list[tuple[int, float]]:
    """Return step and acceptance length of every evaluation that drafted anything."""
    found = [record for record in log if record["kind"] == "evaluation"]
    return [
        (record["step"], record["acceptance_length"]) for record in found if record["acceptance_length"] is not None
    ]


def _acceptance(measured: Mapping[str, Record]) -> dict[str, Figure]:
    per_source: dict[str, dict[str, float | None]] = {}
    for kind, found in measured.items():
        for source, part in found["per_source"].items():
            per_source.setdefault(source, {})[kind] = part["acceptance_length"]
    return {
        "acceptance_positions": figures.positions(
            {kind: found["acceptance_length"] for kind, found in measured.items()},
            {kind: found["per_position"] for kind, found in measured.items()},
        ),
        "acceptance_sources": figures.sources(
            per_source, max((found["drafts"] for found in measured.values()), default=1)
        ),
    }


def _samples(parts: Sequence[Record], dataset: Record) -> dict[str, Figure]:
    lengths: dict[str, Counter[int]] = {name: Counter() for name in ("prompt", "reasoning", "answer")}
    rejects: Counter[str] = Counter()
    for part in parts:
        rejects.update(part["total"]["rejects"])
        for name, total in lengths.items():
            total.update({int(bound): count for bound, count in part["lengths"].get(name, {}).items()})
    repeated = dataset["total"]["rejects"]
    kept = sum(part["total"]["samples"] for part in parts) - sum(repeated.values())
    rejects.update(repeated)
    return {"lengths": figures.lengths(lengths), "rejects": figures.rejects(rejects, kept)}


def _draft_rows(measured: Mapping[str, Record]) -> Rows:
    rows: dict[str, Any] = {}
    for kind, found in measured.items():
        rows[f"acceptance length, {kind}"] = found["acceptance_length"]
        rows[f"verification steps, {kind}"] = found["steps"]
        if "on_served_prompts" in found:
            rows["the same on the prompts that were served"] = found["on_served_prompts"]["acceptance_length"]
    if served := measured.get("served"):
        speed, pace = served["tokens_per_second"], served["milliseconds_per_token"]
        rows["prompts served"] = served["prompts"]
        rows["engine"] = _engine(served["engine"])
        rows["tokens/s with the draft"] = speed["with_draft"]
        rows["tokens/s without"] = speed["without_draft"]
        rows["speed-up"] = speed["with_draft"] / speed["without_draft"]
        rows["ms per token with the draft"] = pace["with_draft"]
        rows["ms per token without"] = pace["without_draft"]
        rows["answers that are the same with and without"] = served["identical_outputs"]
    if sampled := measured.get("sampled"):
        rows["temperature, sampled"] = sampled["temperature"]
    return rows


def _engine(identity: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in identity.items() if name != "name")
    return f"{identity['name']} ({versions})"


def _training_rows(metrics: Record) -> Rows:
    return {
        "optimiser steps": metrics["steps"],
        "skipped steps (gradient not finite)": metrics["skipped_steps"],
        "held-out acceptance length of the weights kept": metrics["acceptance_length"],
        "expected from the shares by position": metrics["expected_acceptance_length"],
    }


def _data_rows(samples: Sequence[Record], dataset: Record, vocabulary: Record) -> Rows:
    rows, kept = (sum(part["total"][name] for part in samples) for name in ("rows", "samples"))
    total = dataset["total"]
    tokens, supervised = total.get("train tokens"), total.get("train supervised tokens")
    return {
        "generations rejected": rows - kept + sum(total["rejects"].values()),
        "training samples": total.get("train samples"),
        "training tokens": tokens,
        "of which trained on (answers)": supervised,
        "supervised share": supervised / tokens if tokens else None,
        "samples of given answers (off-policy)": sum(part["total"].get("off_policy", 0) for part in samples),
        "held-out samples": total.get("eval samples"),
        "draft vocabulary": vocabulary["size"],
        "its coverage of the answers": vocabulary["coverage"],
    }


def _state_rows(parts: Sequence[Record]) -> Rows:
    stored = sum(part["stored"] for part in parts)
    agreed = sum(part["teacher_agreement"] * part["stored"] for part in parts)
    return {
        "samples captured": stored,
        "samples that could not be captured": sum(sum(part["failed"].values()) for part in parts),
        "agreement with the engine's own next token": agreed / stored if stored else None,
        "size (GB)": sum(part["bytes"] for part in parts) / 1e9,
    }
