"""What the user sees while a stage runs: progress with rate and ETA, and one table at its end.

Presentation only: this module never decides a byte of an artifact, so it is left out of fingerprints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

_consoles = [Console(stderr=True, highlight=False, markup=False)]


def log_to(path: Path) -> None:
    """Also write every message and table to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _consoles.append(Console(file=path.open("w", encoding="utf-8"), highlight=False, markup=False, width=120))


def progress(total: int | None, title: str, unit: str) -> tqdm[Any]:
    """Return a progress bar for long work; call `.update(n)` on it and use it as a context manager.

    On a terminal it redraws; in a log it prints a line every ten seconds.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=title,
        unit=f" {unit}",
        unit_scale=True,
        mininterval=0.2 if terminal else 10.0,
        ascii=not terminal,
        dynamic_ncols=terminal,
        file=sys.stderr,
    )


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
    """Print the counts of a finished stage as a two-column table; nested mappings are flattened."""
    table(title, list(_flatten(counts)))


def size(count: float) -> str:
    """Return a number of bytes for people: 4.6 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


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
