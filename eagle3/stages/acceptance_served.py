"""Served acceptance: held-out prompts answered by the configured engine, with and without the draft, in one run.

In: held-out samples, the exported draft. Out: `acceptance.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.acceptance.figures import GenerationCounts, acceptance_figures, choose
from eagle3.config.acceptance import AcceptanceSettings
from eagle3.console import Progress, say
from eagle3.engines.base import Engine, GenerationRequest, Sampling, Served, open_engine
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import hash_of
from eagle3.files.records import read_records, write_json
from eagle3.records import Sample
from eagle3.target.pin import load_target

if TYPE_CHECKING:
    from eagle3.config.engine import EngineSettings
    from eagle3.config.machine import MachineSettings

# Logit gaps are computed for the first answers that differ only: each one is a pass through the target.
_MEASURED_GAPS = 32


def make(
    settings: AcceptanceSettings,
    engine: EngineSettings,
    machine: MachineSettings,
    *,
    target: Path,
    evaluation: Path,
    export: Path,
    folder: Path,
) -> dict[str, Any]:
    """Write `acceptance.json`: acceptance overall and by source, speed both ways, and whether outputs are the same.

    Prompts are served greedily and, if a temperature is set and the engine can, also sampled (`sampled`). Greedy
    speculation must not change a single token except through rounding: where an answer differs, the gap between the
    logits of the two tokens at the first difference is recorded.

    Args:
        settings: prompts, tokens and draft tokens.
        engine: which engine.
        machine: where it runs.
        target: `target.json`.
        evaluation: held-out samples; their prompts are served exactly as the target saw them.
        export: config.json of the exported draft.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: there are no held-out samples, or the engine did not use the draft model.
    """
    samples = choose(read_records(evaluation), settings.prompts)
    if not samples:
        raise Eagle3Error("no held-out samples to serve", where=evaluation, remedy="raise dataset.eval_fraction")
    with open_engine(engine, machine, load_target(target), folder) as opened:
        greedy, sampled = _serve(opened, settings, samples, export)
        identity = {"name": opened.name, **opened.versions}
    if not greedy["steps"]:
        raise Eagle3Error(
            "the engine never used the draft model",
            where=export,
            remedy="raise acceptance.max_tokens; with vLLM, see its log in the work folder",
        )
    found = {"kind": "served", "engine": identity, "max_tokens": settings.max_tokens, **greedy, "sampled": sampled}
    write_json(folder / "acceptance.json", found)
    return {"engine": identity["name"], "prompts": len(samples), **_counts(greedy, sampled)}


def _counts(greedy: dict[str, Any], sampled: dict[str, Any] | None) -> dict[str, Any]:
    counts = {
        "acceptance_length": greedy["acceptance_length"],
        "per_position": greedy["per_position"],
        "identical_outputs": greedy["identical_outputs"],
        **_speeds(greedy),
    }
    if sampled:
        figures = {"acceptance_length": sampled["acceptance_length"], **_speeds(sampled)}
        counts["temperature"] = sampled["temperature"]
        counts |= {f"sampled_{name}": value for name, value in figures.items()}
    return counts


def _serve(
    engine: Engine, settings: AcceptanceSettings, samples: Sequence[Sample], export: Path
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the figures of greedy serving, and those of sampling if a temperature is set.

    First everything without the draft, then everything with it: servers are restarted in between.
    """
    requests = [_request(sample) for sample in samples]
    samplings = [Sampling(settings.max_tokens)]
    if settings.temperature and engine.sampling_fault:
        say(f"only greedy serving is measured: {engine.sampling_fault}")
    elif settings.temperature:
        samplings.append(Sampling(settings.max_tokens, settings.temperature, settings.top_p))
    with Progress(2 * len(samplings), "serving", "runs") as bar:

        def run(draft: Path | None) -> list[Served]:
            runs = []
            for sampling in samplings:
                runs.append(engine.serve(requests, sampling, draft, settings.drafts))
                bar.update(1)
            return runs

        plain, speculative = run(None), run(export.parent)
    greedy, *sampled = (
        _figures(samples, without, with_draft, settings.drafts)
        for without, with_draft in zip(plain, speculative, strict=True)
    )
    ids = [sample["id"] for sample in samples]
    greedy["identical_outputs"] = sum(plain[0].token_ids[id] == speculative[0].token_ids[id] for id in ids) / len(ids)
    greedy["divergences"] = _divergences(engine, requests, plain[0], speculative[0])
    if not sampled:
        return greedy, None
    return greedy, {"temperature": settings.temperature, "top_p": settings.top_p, **sampled[0]}


def _request(sample: Sample) -> GenerationRequest:
    start = sample["spans"][0][0]
    seed = int(hash_of(sample["id"])[:8], 16) >> 1
    return GenerationRequest(id=sample["id"], messages=[], seed=seed, prompt_ids=sample["input_ids"][:start])


def _figures(samples: Sequence[Sample], plain: Served, speculative: Served, draft_tokens: int) -> dict[str, Any]:
    ids = [sample["id"] for sample in samples]
    missing = [name for name in ids if name not in plain.token_ids or name not in speculative.token_ids]
    if missing:
        raise Eagle3Error("the engine left prompts unanswered", found=", ".join(missing[:3]), expected=len(ids))
    generations = [
        GenerationCounts(s["source"], speculative.steps[s["id"]], speculative.accepted[s["id"]]) for s in samples
    ]
    return {
        **acceptance_figures(generations, draft_tokens),
        "prompts": len(ids),
        "tokens": sum(len(speculative.token_ids[name]) for name in ids),
        "tokens_per_second": {"with_draft": _speed(speculative), "without_draft": _speed(plain)},
        "milliseconds_per_token": {"with_draft": _pace(speculative), "without_draft": _pace(plain)},
    }


def _speed(served: Served) -> float:
    """Tokens per second over all prompts together."""
    return sum(map(len, served.token_ids.values())) / served.seconds


def _pace(served: Served) -> float:
    """Milliseconds per token for one user, including the time for the prompt."""
    return 1000 * sum(served.durations.values()) / sum(map(len, served.token_ids.values()))


def _speeds(figures: dict[str, Any]) -> dict[str, float]:
    rates, paces = figures["tokens_per_second"], figures["milliseconds_per_token"]
    return {
        "tokens_per_second_with_draft": rates["with_draft"],
        "tokens_per_second_without_draft": rates["without_draft"],
        "milliseconds_per_token_with_draft": paces["with_draft"],
        "milliseconds_per_token_without_draft": paces["without_draft"],
    }


def _divergences(
    engine: Engine, requests: Sequence[GenerationRequest], plain: Served, speculative: Served
) -> list[dict[str, Any]]:
    """Return where each differing answer differs first, both tokens there, and for the first few their logit gap."""
    found: list[dict[str, Any]] = []
    prefixes: list[list[int]] = []
    for request in requests:
        answers = list(zip(plain.token_ids[request.id], speculative.token_ids[request.id], strict=False))
        place = next((index for index, (a, b) in enumerate(answers) if a != b), None)
        if place is not None:
            found.append({"id": request.id, "position": place, "tokens": list(answers[place]), "logit_gap": None})
            prefixes.append([*(request.prompt_ids or []), *plain.token_ids[request.id][:place]])
    if not found:
        return []
    measured = found[:_MEASURED_GAPS]
    gaps = engine.logit_gaps(prefixes[:_MEASURED_GAPS], [entry["tokens"] for entry in measured])
    for entry, gap in zip(measured, gaps, strict=True):
        entry["logit_gap"] = gap
    return found
