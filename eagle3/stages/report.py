"""Report: the statistics of all stages in; figures, tables and a few samples out, for `snakemake --report`."""

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
from eagle3.report import figures, pages, tables
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
        folder: the work folder, which becomes the artifact.

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
        "Draft": tables.draft(measured),
        "Training": tables.training(read_json(draft_metrics)),
        "Data": tables.data(samples, dataset, vocabulary),
        "Hidden states": tables.hidden_states([read_json(path) for path in hidden_states_stats]),
    }
    parts = [pages.table(title, rows) for title, rows in sections.items() if rows]
    parts += [tables.sources(prompts, samples, dataset, vocabulary), tables.reasons(prompts, samples, dataset)]
    pages.write(folder / SUMMARY, "Summary", *parts)
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
