"""Finds out how many requests a server should be asked at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from eagle3.console import progress
from eagle3.engines import GenerationRequest, Message, Sampling, open_engine
from eagle3.engines.settings import EngineSettings, MachineSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.report import figures
from eagle3.target import Target, load_target

if TYPE_CHECKING:
    from eagle3.config import Config

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
# Each level is asked so many requests per one in flight, for a plateau between the ramp and the tail.
_ROUNDS = 3
# More in flight must gain this much, or the ramp ends: beyond, requests only wait longer.
_GAIN = 1.03
# Fewer in flight that are almost as fast are better: less memory, fewer lost at a crash.
_ALMOST = 0.95


@dataclass(frozen=True)
class Level:
    """What one number of requests in flight gave; `seconds_per_request` is what one request takes at that load."""

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
    """Ask a handful of prompts at rising concurrency, on one server, until more brings no more.

    Args:
        settings: the engine: `vllm` or `openai`.
        machine: where it runs; its own `concurrency` is not used.
        target: the model.
        requests: prompts like those of the run; they are asked again and again with other seeds.
        sampling: as in the run: answers of another length have another best concurrency.
        folder: where a managed server keeps its log.
        levels: what to try, rising.

    Returns:
        a row for every level tried (the fields of `Level`), and the recommended concurrency: the smallest one with
        almost the best tokens per second.

    Raises:
        Eagle3Error: the engine has no concurrency, or a request failed.
    """
    tried: list[Level] = []
    with open_engine(settings, machine, target, folder) as engine, progress(len(levels), "tuning", "levels") as bar:
        if not hasattr(engine, "concurrency"):
            raise Eagle3Error("only servers have a concurrency to tune", where=f"engine.name: {settings.name}")
        list(engine.generate(requests[:1], sampling))  # so that loading the model counts for no level
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
    """Repeat the requests with ids and seeds of their own."""
    for number, request in enumerate(islice(cycle(requests), count)):
        yield replace(request, id=f"{level}-{number}", seed=number)


def _has_levelled_off(tried: Sequence[Level]) -> bool:
    """Whether the last two levels brought nothing over the best before them: one alone may be a hiccup."""
    if len(tried) < 3:
        return False
    best = max(level.tokens_per_second for level in tried[:-2])
    return all(level.tokens_per_second < _GAIN * best for level in tried[-2:])


def tune(config: Config, pin: Path, prompts: Path, count: int, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Tune with the first turns of the first `count` prompts of a part, and the sampling of the configuration.

    Writes into `folder`: `concurrency.svg`, tokens per second by requests in flight, and `concurrency.yaml`, a
    configuration file that sets the recommended number.
    """
    settings = config.responses
    requests = [
        GenerationRequest(
            prompt["id"], _first_turn(prompt["messages"]), 0, prompt.get("tools"), settings.template_kwargs
        )
        for prompt in islice(read_records(prompts), count)
    ]
    if not requests:
        raise Eagle3Error("there are no prompts to tune with", where=prompts, remedy="give another part")
    sampling = Sampling(settings.max_tokens, settings.temperature, settings.top_p)
    folder.mkdir(parents=True, exist_ok=True)
    rows, best = tune_concurrency(config.engine, config.machine, load_target(pin), requests, sampling, folder=folder)
    write(rows, best, folder)
    return rows, best


def write(rows: Sequence[dict[str, Any]], best: int, folder: Path) -> None:
    """Write the figure and the configuration file."""
    with mpl.rc_context(figures.STYLE):
        levels, speeds = ([row[name] for row in rows] for name in ("concurrency", "tokens_per_second"))
        figures.save(figures.concurrency(levels, speeds, best), folder / "concurrency.svg")
    (folder / "concurrency.yaml").write_text(f"machine:\n  concurrency: {best}\n", encoding="utf-8")


def _first_turn(messages: Sequence[Message]) -> list[Message]:
    end = next(number for number, message in enumerate(messages, start=1) if message["role"] == "user")
    return list(messages[:end])
