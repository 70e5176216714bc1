"""The command line: what it makes of its arguments, and how it prints names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from eagle3 import console
from eagle3.cli.main import app


class Noted:
    """Notes the job instead of doing it."""

    inputs: dict[str, Any]

    def __init__(self, **_: Any) -> None:
        pass

    def produce(self, stage: str, output: Path, inputs: dict[str, Any]) -> None:
        Noted.inputs = {"stage": stage, "output": output, **inputs}


@pytest.mark.parametrize("run", ["demo", "samples", "hidden_states"])
def test_the_report_tells_its_statistics_apart_whatever_the_run_is_called(run: str) -> None:
    files = {stage: f"results/{run}/{stage}/part-0/stats.json" for stage in ("samples", "hidden_states")}
    options = ("target", "train", "training-log", "draft-metrics", "prompts-stats", "dataset-stats", "vocabulary-stats")
    named = [text for name in (*options, "simulated", "served", "output") for text in (f"--{name}", f"{name}.json")]
    result = CliRunner().invoke(app, ["report", *named, *files.values()], obj=Noted)
    assert result.exit_code == 0, result.output
    assert Noted.inputs["samples_stats"] == [Path(files["samples"])]
    assert Noted.inputs["hidden_states_stats"] == [Path(files["hidden_states"])]


def test_names_are_printed_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(console, "_consoles", list[Console]())
    console.log_to(tmp_path / "log")
    console.summary("prompts: a [bold] folder", {"by source": {"[red]a[/b]": 3}})
    printed = (tmp_path / "log").read_text(encoding="utf-8")
    assert "a [bold] folder" in printed
    assert "[red]a[/b]" in printed
