from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from eagle3 import console


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """What a log gets: no terminal."""
    output = StringIO()
    monkeypatch.setattr(console, "_stderr", Console(file=output, markup=False, highlight=False))
    return output


def test_a_log_gets_lines_with_count_rate_and_remaining_time(log: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(console, "_BAR_SECONDS", 0.0)
    with console.Progress(40_000, "draft", "tokens") as bar:
        bar.update(10_000, "loss 3.1")
        bar.update(20_000, "loss 2.9")
        bar.update(20_000)
    *lines, last = log.getvalue().splitlines()
    assert lines[0].startswith("draft: 10.0k of 40.0k tokens, ")
    assert lines[0].endswith(", loss 3.1")
    assert "tokens/s, 0:00:01 left, loss 2.9" in lines[1]
    assert last.startswith("draft: 40.0k of 40.0k tokens, ")
    assert "left" not in last


def test_quick_work_gets_one_line_and_no_work_none(log: StringIO) -> None:
    with console.Progress(None, "samples", "answers") as bar:
        for _ in range(1500):
            bar.update(1)
    with console.Progress(0, "nothing", "samples") as bar:
        bar.update(7)
    (line,) = log.getvalue().splitlines()
    assert line.startswith("samples: 1.5k answers, ")
    assert line.endswith(" answers/s")
