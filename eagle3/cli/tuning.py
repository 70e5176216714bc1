"""Find the best number of concurrent requests for a server, with the prompts and sampling of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from eagle3.engines.base import GenerationRequest, Sampling
from eagle3.engines.tuning import tune_concurrency
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.records import Message
from eagle3.report import figures
from eagle3.target.pin import load_target

if TYPE_CHECKING:
    from eagle3.config.configuration import Config


def tune(config: Config, pin: Path, prompts: Path, count: int, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Tune with the first turns of the first `count` prompts of a part, and the sampling of the configuration.

    Writes into `folder`: `concurrency.svg`, tokens per second by concurrency, and `concurrency.yaml`, a configuration
    file that sets the recommended concurrency.
    """
    settings = config.responses
    requests = [
        GenerationRequest(
            id=prompt["id"],
            messages=_first_turn(prompt["messages"]),
            seed=0,
            tools=prompt.get("tools"),
            template_kwargs=settings.template_kwargs,
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
