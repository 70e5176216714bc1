"""vLLM's counts of accepted draft tokens: per request, and for the whole server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_METRIC = re.compile(
    r"^vllm:spec_decode_num_(?P<name>drafts|accepted_tokens_per_pos)_total\{(?P<labels>.*)\} (?P<value>\S+)$", re.M
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counts:
    """Verification steps with draft tokens, and accepted draft tokens by position (length k)."""

    steps: int
    accepted: tuple[int, ...]


def of_answer(answer: dict[str, Any], k: int) -> Counts:
    """Read the counts of one request (`--per-request-spec-decode-metrics summary`).

    vLLM gives a histogram: entry j counts the steps in which exactly j draft tokens were accepted. It is
    missing if there was no such step.
    """
    figures = (answer.get("metrics") or {}).get("speculative_decoding")
    if figures is None:
        return Counts(0, (0,) * k)
    histogram = figures["acceptance_histogram"]
    return Counts(figures["num_spec_steps"], tuple(sum(histogram[place + 1 :]) for place in range(k)))


def of_server(metrics: str, k: int) -> Counts:
    """Read the counters of a server since its start (`/metrics`), summed over its engines."""
    steps = 0
    accepted = [0] * k
    for match in _METRIC.finditer(metrics):
        value = int(float(match["value"]))
        if position := _POSITION.search(match["labels"]):
            accepted[int(position[1])] += value
        else:
            steps += value
    return Counts(steps, tuple(accepted))


def total(parts: Iterable[Counts], k: int) -> Counts:
    """Return the sum."""
    parts = list(parts)
    accepted = [part.accepted for part in parts if part.steps]
    return Counts(sum(part.steps for part in parts), tuple(sum(each[place] for each in accepted) for place in range(k)))
