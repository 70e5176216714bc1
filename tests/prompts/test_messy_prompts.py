"""Prompt sources as found in the wild: odd numbers, types, names and repetitions."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pytest

from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json
from eagle3.prompts.conversations import to_conversation
from tests.prompts.rows import ASK, parts, rejected, run, user, write

HUGE = b"9" * 5000


def test_a_number_of_thousands_of_digits_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "n": ' + HUGE + b'}\n{"prompt": "b"}\n')
    run(tmp_path / "out", path)
    assert rejected(tmp_path / "out") == [("a.jsonl:1", "not_json")]
    array = tmp_path / "b.json"
    array.write_bytes(b'[{"prompt": "a", "n": ' + HUGE + b"}]")
    with pytest.raises(Eagle3Error, match=r"no valid JSON array.*line 1"):
        run(tmp_path / "array", array)


def test_types_that_json_lacks_become_text(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"day": datetime.date(2020, 1, 2)}}
    row = {
        "messages": [*user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"name": "f", "price": Decimal("1.25"), "image": b"x"}],
    }
    polars.DataFrame([row], schema_overrides={}).write_parquet(tmp_path / "a.parquet")
    run(tmp_path / "out", {"path": str(tmp_path / "a.parquet"), "answers": "as_is"})
    [prompt] = parts(tmp_path / "out")
    assert prompt["tools"][0]["price"] == "1.25"
    assert prompt["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"day": "2020-01-02"}'


@pytest.mark.parametrize("name", ["a[1]", "a*"])
def test_a_name_with_the_signs_of_a_glob_means_itself(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"folder {name}"
    folder.mkdir()
    for stem, text in ((name, "this"), ("ab", "not this")):
        polars.DataFrame({"prompt": [text]}).write_parquet(tmp_path / f"{stem}.parquet")
    (tmp_path / f"{name}.parquet").rename(folder / f"{name}.parquet")
    polars.DataFrame({"prompt": ["and this"]}).write_parquet(folder / "ab.parquet")
    run(tmp_path / "out", folder)
    assert sorted(record["messages"][0]["content"] for record in parts(tmp_path / "out")) == ["and this", "this"]
    assert rejected(tmp_path / "out") == []


def test_what_a_weight_leaves_out_may_come_from_another_source(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}"} for number in range(40)]
    one, other = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows)
    counts = run(tmp_path / "out", {"path": str(one), "weight": 0.25}, other)
    assert counts["prompts"] == 40
    sources = read_json(tmp_path / "out" / "stats.json")["sources"]
    assert 0 < sources["a"]["prompts"] == 40 - sources["a"]["not taken"] == sources["b"]["rejects"]["duplicate"] < 40


def test_the_same_system_message_in_two_places_counts_once() -> None:
    row: dict[str, Any] = {"system": "Be brief.", "messages": [{"role": "system", "content": "Be brief."}, *ASK]}
    assert to_conversation(row, "messages").messages[0]["content"] == "Be brief."
    row["system"] = "Be kind."
    assert to_conversation(row, "messages").messages[0]["content"] == "Be kind.\n\nBe brief."


def test_the_same_reasoning_in_two_places_counts_once_whatever_the_blanks() -> None:
    reply = {"role": "assistant", "content": "<think>\ncount\n</think>\n\nSeven", "reasoning_content": "count"}
    [_, message] = to_conversation({"messages": [*ASK, reply]}, "messages", as_is=True).messages
    assert message == {"role": "assistant", "content": "\n\nSeven", "reasoning": "count"}
