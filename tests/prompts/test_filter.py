"""`where` takes the rows whose columns match, and counts the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json
from eagle3.prompts.filter import Filter
from tests.prompts.rows import parts, run, write

ROWS = [
    {"prompt": "a", "language": "English", "turn": 1, "toxic": False},
    {"prompt": "b", "language": "English", "turn": 2, "toxic": True},
    {"prompt": "c", "language": "German", "turn": 1, "toxic": False},
    {"prompt": "d", "turn": 3, "tags": ["x"]},
]


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ({}, "abcd"),
        ({"language": "English"}, "ab"),
        ({"language": ["English", "German"], "turn": 1}, "ac"),
        ({"turn": [1, 2.0]}, "abc"),
        ({"turn": True}, ""),
        ({"toxic": False}, "ac"),
        ({"toxic": 0}, ""),
        ({"language": None}, "d"),
        ({"turn": "1"}, ""),
        ({"tags": "x"}, ""),
        ({"turn": []}, ""),
    ],
)
def test_columns_match_by_value(where: dict[str, Any], taken: str) -> None:
    chosen = Filter(where)
    assert "".join(row["prompt"] for row in ROWS if chosen.takes(row)) == taken  # type: ignore[misc]


@given(
    rows=st.lists(st.fixed_dictionaries({"a": st.integers(0, 3), "b": st.sampled_from("xyz")}), max_size=20),
    a=st.lists(st.integers(0, 3), max_size=3),
    b=st.sampled_from("xyz"),
)
def test_it_takes_what_a_query_takes(rows: list[dict[str, Any]], a: list[int], b: str) -> None:
    chosen = Filter({"a": list(a), "b": b})
    frame = polars.DataFrame(rows, schema={"a": polars.Int64, "b": polars.String})
    expected = frame.filter(polars.col("a").is_in(a) & (polars.col("b") == b)).to_dicts()
    assert [row for row in rows if chosen.takes(row)] == expected


def test_rows_left_out_are_counted_and_not_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS, ["no columns"])
    counts = run(tmp_path / "out", {"path": str(path), "where": {"language": "English"}})
    assert (counts["rows"], counts["prompts"], counts["filtered"]) == (5, 2, 2)
    assert counts["rejects"] == {"wrong_form": 1}
    assert {record["messages"][0]["content"] for record in parts(tmp_path / "out")} == {"a", "b"}
    assert read_json(tmp_path / "out" / "stats.json")["sources"]["a"]["filtered"] == 2


def test_the_form_is_looked_for_in_rows_that_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"kind": 1, "prompt": "a", "turns": ["b"]}, {"kind": 2, "prompt": "c"})
    assert run(tmp_path / "out", {"path": str(path), "where": {"kind": 2}})["prompts"] == 1


def test_parquet_columns(tmp_path: Path) -> None:
    polars.DataFrame({"prompt": ["a", "b"], "turn": [1, None]}).write_parquet(tmp_path / "a.parquet")
    assert run(tmp_path / "out", {"path": str(tmp_path / "a.parquet"), "where": {"turn": 1}})["filtered"] == 1


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"language": "english"}, r"`language` is 'English', 'German'"),
        ({"langauge": "English"}, r"no row has `langauge` \(there are prompt, language, turn, toxic, tags\)"),
    ],
)
def test_a_filter_that_takes_nothing_says_what_there_is(tmp_path: Path, where: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    with pytest.raises(Eagle3Error, match=rf"(?s)no usable prompt.*{message}.*`where`"):
        run(tmp_path / "out", {"path": str(path), "where": where})
