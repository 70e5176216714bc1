"""Served acceptance: held-out prompts answered by the configured engine, with and without the draft, in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.acceptance import AcceptanceSettings, Drafted, summarise
from eagle3.console import progress
from eagle3.engines import Engine, GenerationRequest, Sampling, Served, open_engine
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import hash_of
from eagle3.files.records import Record, read_records, write_json
from eagle3.target import Target, head_weights, load_target

if TYPE_CHECKING:
    from eagle3.engines.settings import EngineSettings, MachineSettings

# Answers that differ are explained for the first of them only: each explanation is a pass through the target.
_EXPLAINED = 8


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

    Greedy speculation must not change a single token but for rounding: where an answer differs, the gap between
    the two candidates' logits at the first difference is recorded.

    Args:
        settings: prompts, tokens and drafts.
        engine: which engine.
        machine: where it runs.
        target: `target.json`.
        evaluation: held-out samples; their prompts are served exactly as the target saw them.
        export: config.json of the exported draft.
        folder: where to work.

    Raises:
        Eagle3Error: no held-out samples, or the engine did not use the draft.
    """
    pinned = load_target(target)
    samples = choose(read_records(evaluation), settings.prompts)
    if not samples:
        raise Eagle3Error(
            "there are no held-out samples to serve", where=evaluation, remedy="raise dataset.eval_fraction"
        )
    requests = [_request(sample) for sample in samples]
    sampling = Sampling(settings.max_tokens)
    with open_engine(engine, machine, pinned, folder) as opened, progress(2, "serving", "runs") as bar:
        plain = opened.serve(requests, sampling, None, settings.drafts)
        bar.update(1)
        drafted = opened.serve(requests, sampling, export.parent, settings.drafts)
        bar.update(1)
        divergences = _divergences(opened, pinned, requests, plain, drafted)
        identity = {"name": opened.name, **opened.versions}
    figures = _figures(samples, plain, drafted, settings.drafts)
    if not figures["steps"]:
        raise Eagle3Error(
            "the engine served without ever asking the draft",
            where=export,
            remedy="raise acceptance.max_tokens; with vLLM, see its log in the work folder",
        )
    write_json(
        folder / "acceptance.json",
        {
            "kind": "served",
            "engine": identity,
            "max_tokens": settings.max_tokens,
            **figures,
            "divergences": divergences,
        },
    )
    speed = figures["tokens_per_second"]
    return {
        "engine": opened.name,
        "prompts": len(samples),
        "acceptance length": figures["acceptance_length"],
        "per position": figures["per_position"],
        "tokens per second with draft": speed["with_draft"],
        "tokens per second without": speed["without_draft"],
        "identical outputs": figures["identical_outputs"],
    }


def choose(samples: Iterable[Record], count: int) -> list[Record]:
    """Choose up to `count` samples, taking the sources in turn; which of a source is decided by the ids' hashes."""
    by_source: dict[str, list[Record]] = {}
    for sample in samples:
        by_source.setdefault(sample["source"], []).append(sample)
    columns = [sorted(by_source[source], key=lambda sample: hash_of(sample["id"])) for source in sorted(by_source)]
    in_turn = [sample for layer in zip_longest(*columns) for sample in layer if sample is not None]
    return in_turn[:count]


def _request(sample: Record) -> GenerationRequest:
    start = sample["spans"][0][0]
    return GenerationRequest(id=sample["id"], messages=[], seed=0, prompt_ids=sample["input_ids"][:start])


def _figures(samples: Sequence[Record], plain: Served, drafted: Served, drafts: int) -> dict[str, Any]:
    ids = [sample["id"] for sample in samples]
    missing = [name for name in ids if name not in plain.token_ids or name not in drafted.token_ids]
    if missing:
        raise Eagle3Error("the engine left prompts unanswered", found=", ".join(missing[:3]), expected=len(ids))
    rows = [Drafted(s["source"], drafted.drafts[s["id"]], drafted.accepted[s["id"]]) for s in samples]
    same = sum(plain.token_ids[name] == drafted.token_ids[name] for name in ids)
    return {
        **summarise(rows, drafts),
        "prompts": len(ids),
        "tokens": sum(len(drafted.token_ids[name]) for name in ids),
        "identical_outputs": same / len(ids),
        "tokens_per_second": {
            "with_draft": _speed(drafted),
            "without_draft": _speed(plain),
        },
    }


def _speed(served: Served) -> float:
    return sum(map(len, served.token_ids.values())) / served.seconds


def _divergences(
    engine: Engine, target: Target, requests: Sequence[GenerationRequest], plain: Served, drafted: Served
) -> list[dict[str, Any]]:
    """Return where answers differ first, both tokens there, and for the first few how far apart the target has them.

    The gap is a difference of logits, in the engine's own rounding; only the embedded engine is asked for it: a server
    would have to be started anew.
    """
    found: list[dict[str, Any]] = []
    prefixes: list[list[int]] = []
    for request in requests:
        answers = list(zip(plain.token_ids[request.id], drafted.token_ids[request.id], strict=False))
        place = next((index for index, (one, other) in enumerate(answers) if one != other), None)
        if place is not None:
            found.append({"id": request.id, "position": place, "tokens": list(answers[place]), "logit_gap": None})
            prefixes.append([*(request.prompt_ids or []), *plain.token_ids[request.id][:place]])
    if engine.name == "transformers" and found:
        gaps = _logit_gaps(engine, target, prefixes[:_EXPLAINED], [entry["tokens"] for entry in found])
        for entry, gap in zip(found, gaps, strict=False):
            entry["logit_gap"] = gap
    return found


def _logit_gaps(
    engine: Engine, target: Target, prefixes: Sequence[list[int]], tokens: Sequence[list[int]]
) -> list[float]:
    """Return logit(first token) - logit(second token) after each prefix."""
    import torch

    head = head_weights(target)
    states = {tuple(capture.token_ids): capture.states for capture in engine.capture(prefixes, [target.num_layers])}
    gaps = []
    for prefix, pair in zip(prefixes, tokens, strict=False):
        state = states[tuple(prefix)][-1, 0].float()
        normed = torch.nn.functional.rms_norm(state, state.shape, head.norm.float(), head.rms_norm_eps)
        first, second = (head.lm_head[pair].float() @ normed).tolist()
        gaps.append(first - second)
    return gaps
