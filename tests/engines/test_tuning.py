"""Which concurrency is recommended."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from eagle3.cli.tuning import tune, write
from eagle3.config.configuration import load
from eagle3.engines.tuning import Level, _has_levelled_off, recommend
from eagle3.errors import Eagle3Error
from eagle3.files.records import write_records


def levels(speeds: dict[int, float]) -> list[Level]:
    return [Level(n, 3 * n, 100, 1.0, speed, 1.0) for n, speed in speeds.items()]


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({1: 10, 2: 20, 4: 40}, 4),
        ({1: 10, 2: 20, 4: 20.5, 8: 20.4}, 2),
        ({1: 10, 2: 20, 4: 12}, 2),
        ({1: 10}, 1),
    ],
)
def test_the_smallest_that_is_almost_the_fastest_is_recommended(speeds: dict[int, float], best: int) -> None:
    assert recommend(levels(speeds)) == best


def test_the_ramp_ends_after_two_levels_without_gain() -> None:
    assert not _has_levelled_off(levels({1: 10, 2: 9}))
    assert not _has_levelled_off(levels({1: 10, 2: 9, 4: 11}))
    assert _has_levelled_off(levels({1: 10, 2: 10.1, 4: 9}))
    assert not _has_levelled_off(levels({1: 10, 2: 15, 4: 20, 8: 40}))


def test_what_is_recommended_is_drawn_and_is_a_configuration(tmp_path: Path) -> None:
    write([asdict(level) for level in levels({1: 10, 2: 20, 4: 20.5})], 2, tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text("run: mine\nprompts: {sources: [{path: a.jsonl}]}\nmachine: {threads: 7}\n")
    machine = load([run, tmp_path / "concurrency.yaml"]).machine
    assert (machine.concurrency, machine.threads) == (2, 7)
    assert "2 requests in flight" in (tmp_path / "concurrency.svg").read_text()
    assert "mathdefault" not in (tmp_path / "concurrency.svg").read_text()


def test_a_part_without_prompts_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("run: mine\nprompts: {sources: [{path: a.jsonl}]}\n")
    write_records(tmp_path / "part-0.jsonl.zst", ())
    with pytest.raises(Eagle3Error, match="no prompts to tune with"):
        tune(load([run]), tmp_path / "target.json", tmp_path / "part-0.jsonl.zst", 4, tmp_path / "tuning")
