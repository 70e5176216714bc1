"""Measures how many concurrent requests give a server its best throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import Progress
from eagle3.engines.base import GenerationRequest, Sampling, open_engine
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
# Requests per level, for each one in flight: enough for a plateau between ramp-up and tail.
_ROUNDS = 3
# A higher level must gain this much, or the search ends: beyond it, requests only wait longer.
_GAIN = 1.03
# A lower level that is almost as fast is better: it needs less memory and loses fewer requests in a crash.
_ALMOST = 0.95


@dataclass(frozen=True)
class Level:
    """The measurement at one concurrency; `seconds_per_request` is the latency of one request at that load."""

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seconds_per_request: float


def tune_concurrency(
    settings: EngineSettings,
    machine: MachineSettings,
    target: Target,
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    *,
    folder: Path | None = None,
    levels: Sequence[int] = LEVELS,
) -> tuple[list[dict[str, Any]], int]:
    """Measure one server at rising concurrency, until the throughput no longer grows.

    Args:
        settings: the engine: `vllm` or `openai`.
        machine: where it runs; its own `concurrency` is not used.
        target: the model.
        requests: prompts like those of the run; they are repeated with other seeds.
        sampling: as in the run, since the best concurrency depends on the answers' length.
        folder: for the log of a managed server.
        levels: concurrencies to try, ascending.

    Returns:
        a row for every level tried (the fields of `Level`), and the recommended concurrency (see `recommend`).

    Raises:
        Eagle3Error: the engine has no concurrency, or a request failed.
    """
    tried: list[Level] = []
    with open_engine(settings, machine, target, folder) as engine, Progress(len(levels), "tuning", "levels") as bar:
        if not hasattr(engine, "concurrency"):
            raise Eagle3Error("only a server has a concurrency to tune", where=f"engine.name: {settings.name}")
        list(engine.generate(requests[:1], sampling))  # so that no level includes loading the model
        for level in levels:
            engine.concurrency = level
            tried.append(_measure(engine.generate, level, requests, sampling))
            bar.update(1)
            if _has_levelled_off(tried):
                break
    return [asdict(level) for level in tried], recommend(tried)


def recommend(tried: Sequence[Level]) -> int:
    """Return the smallest concurrency with almost the best tokens per second."""
    best = max(level.tokens_per_second for level in tried)
    return min(level.concurrency for level in tried if level.tokens_per_second >= _ALMOST * best)


def _measure(generate: Any, level: int, requests: Sequence[GenerationRequest], sampling: Sampling) -> Level:
    start = perf_counter()
    answers = list(generate(list(_varied(requests, level, _ROUNDS * level)), sampling))
    seconds = perf_counter() - start
    for answer in answers:
        if answer.error is not None:
            raise Eagle3Error("a request failed while tuning", where=f"{level} in flight", found=answer.error)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return Level(level, len(answers), tokens, seconds, tokens / seconds, seconds * level / len(answers))


def _varied(requests: Sequence[GenerationRequest], level: int, count: int) -> Iterator[GenerationRequest]:
    """Yield the requests repeatedly, each time with its own id and seed."""
    for number, request in enumerate(islice(cycle(requests), count)):
        yield replace(request, id=f"{level}-{number}", seed=number)


def _has_levelled_off(tried: Sequence[Level]) -> bool:
    """Whether the last two levels gained nothing over the best before them; a single one may be an outlier."""
    if len(tried) < 3:
        return False
    best = max(level.tokens_per_second for level in tried[:-2])
    return all(level.tokens_per_second < _GAIN * best for level in tried[-2:])
