"""Output for the user while a stage runs: messages, progress with rate and remaining time, and a table at its end.

Presentation only: nothing here affects an artifact, so this module is left out of fingerprints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.filesize import decimal, pick_unit_and_suffix
from rich.table import Table
from rich.text import Text

_stderr = Console(stderr=True, highlight=False, markup=False)
_consoles = [_stderr]
# Seconds between two lines about the same work in a log, and between two updates of a bar on a terminal.
_LOG_SECONDS = 10.0
_BAR_SECONDS = 0.1


def log_to(path: Path) -> None:
    """Also write every message and table to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _consoles.append(Console(file=path.open("w", encoding="utf-8"), highlight=False, markup=False, width=120))


class Progress:
    """A context manager that shows the progress of long work, with its rate and the remaining time.

    On a terminal it is a bar; in a log, a line every ten seconds and one at the end.

    Args:
        total: how many units there are; None if unknown, 0 shows nothing.
        title: what is being done.
        unit: what is counted, in the plural.
    """

    def __init__(self, total: int | None, title: str, unit: str) -> None:
        self._logs = total != 0 and not _stderr.is_terminal
        self._draws = total != 0 and _stderr.is_terminal
        columns = (rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(), _Figures())
        self._rich = rich.progress.Progress(*columns, console=_stderr)
        self._rich.add_task(title, total=total, unit=unit, note="")
        self._task = self._rich.tasks[0]
        self._pending = 0
        self._flushed = self._logged = time.monotonic()

    def __enter__(self) -> Progress:
        if self._draws:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        if self._draws:
            self._rich.stop()
        if self._logs:
            self._log()

    def update(self, count: int, note: str | None = None) -> None:
        """Count `count` more units as done; `note` is shown next to the figures from now on."""
        self._pending += count
        if note is not None:
            self._task.fields["note"] = note
        now = time.monotonic()
        # rich takes microseconds for an update, and some work is millions of quick steps.
        if now - self._flushed >= _BAR_SECONDS:
            self._flush()
            if self._logs and now - self._logged >= _LOG_SECONDS:
                self._log()

    def _flush(self) -> None:
        done = self._task.completed + self._pending
        self._rich.update(self._task.id, completed=done if self._task.total is None else min(done, self._task.total))
        self._pending = 0
        self._flushed = time.monotonic()

    def _log(self) -> None:
        _stderr.print(f"{self._task.description}: {_figures(self._task)}", soft_wrap=True)
        self._logged = time.monotonic()


class _Figures(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> Text:
        return Text(_figures(task))


def _figures(task: rich.progress.Task) -> str:
    """Return a text such as `12.3k of 40.0k tokens, 1.2k tokens/s, 0:00:23 left`."""
    unit = task.fields["unit"]
    count = _short(task.completed) if task.total is None else f"{_short(task.completed)} of {_short(task.total)}"
    parts = [f"{count} {unit}"]
    if task.elapsed and task.completed:
        parts.append(f"{_short(task.speed or task.completed / task.elapsed)} {unit}/s")
    if task.time_remaining:
        parts.append(f"{timedelta(seconds=math.ceil(task.time_remaining))} left")
    if task.fields["note"]:
        parts.append(task.fields["note"])
    return ", ".join(parts)


def _short(count: float) -> str:
    unit, suffix = pick_unit_and_suffix(int(count), ["", "k", "M", "G", "T"], 1000)
    if unit > 1:
        return f"{count / unit:.1f}{suffix}"
    return f"{count:.0f}" if count >= 10 else f"{count:.2g}"


def say(message: str) -> None:
    """Print one line for the user."""
    for console in _consoles:
        console.print(message, soft_wrap=True)


def fail(message: str) -> None:
    """Print an error."""
    for console in _consoles:
        console.print(message, soft_wrap=True, style="bold red")


def table(title: str, rows: Iterable[Sequence[object]], headings: Sequence[str] = ("", "")) -> None:
    """Print a title and a table; numbers are right-aligned and grouped by thousands."""
    grid = Table(show_header=any(headings))
    rows = [tuple(row) for row in rows]
    for column, heading in enumerate(headings):
        numeric = bool(rows) and all(isinstance(row[column], int | float) for row in rows)
        grid.add_column(heading, justify="right" if numeric else "left")
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    for console in _consoles:
        console.print(title, soft_wrap=True, style="bold")
        console.print(grid)


def summary(title: str, counts: Mapping[str, object]) -> None:
    """Print the counts of a finished stage as a two-column table, nested mappings flattened, `a_name` as "a name"."""
    table(title, list(_flatten({name.replace("_", " "): value for name, value in counts.items()})))


def size(count: int) -> str:
    """Return a number of bytes in readable form, such as `4.6 TB`."""
    return decimal(count)


def _flatten(counts: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for key, value in counts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key} / ")
        else:
            yield prefix + key, value


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
