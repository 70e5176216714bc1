"""`answers: as_is` keeps what the assistant said."""

from pathlib import Path
from typing import Any

import pytest

from eagle3.files.records import Record
from tests.prompts.rows import ASK, parts, rejected, run, user, write


def other_prompt(tmp_path: Path) -> Path:
    """Write a source whose prompts the target answers."""
    return write(tmp_path / "other.jsonl", {"turns": ["something else"]})


class TestGivenAnswers:
    """`answers: as_is` keeps what the assistant said."""

    def keep(self, tmp_path: Path, *rows: object) -> list[Record]:
        path = write(tmp_path / "a.jsonl", *rows)
        run(tmp_path / "out", {"path": str(path), "answers": "as_is"}, other_prompt(tmp_path))
        return [record for record in parts(tmp_path / "out") if record["source"] == "a"]

    @pytest.mark.parametrize(
        ("row", "answer"),
        [
            ({"messages": [*ASK, {"role": "assistant", "content": "x"}, *user("b")]}, {"content": "x"}),
            ({"prompt": "a", "completion": "x"}, {"content": "x"}),
            ({"prompt": ASK, "completion": [{"role": "assistant", "content": "x"}]}, {"content": "x"}),
            ({"instruction": "a", "output": "x"}, {"content": "x"}),
            (
                {"messages": [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
                {"content": "x"},
            ),
            (
                {"messages": [*ASK, {"role": "assistant", "content": "x", "thinking": "y"}]},
                {"content": "x", "reasoning": "y"},
            ),
            (
                {"messages": [*ASK, {"role": "assistant", "content": "<think>\ny\n</think>\n\nx"}]},
                {"content": "\n\nx", "reasoning": "\ny\n"},
            ),
            (
                {"messages": [*ASK, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]},
                {"content": "x\n\ny"},
            ),
            ({"messages": [*ASK, {"role": "assistant", "content": "<think></think>x"}]}, {"content": "x"}),
        ],
    )
    def test_answers_stay_and_what_follows_the_last_one_goes(
        self, tmp_path: Path, row: dict[str, Any], answer: dict[str, Any]
    ) -> None:
        [record] = self.keep(tmp_path, row)
        assert record["messages"][-1] == {"role": "assistant", **answer}

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            ({"content": "<think>never closed"}, "reasoning_form"),
            ({"content": "x", "reasoning": ["y"]}, "reasoning_form"),
            ({"content": "x", "reasoning": "y", "thinking": "z"}, "reasoning_form"),
            ({"content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}, "bad_tool_call"),
            ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "bad_tool_call"),
            ({"content": "x\0"}, "nul_character"),
            ({"content": [{"type": "image_url"}]}, "not_text"),
            (None, "no_answer"),
        ],
    )
    def test_faulty_answers_are_rejected_where_they_are_used(
        self, tmp_path: Path, answer: dict[str, Any] | None, reason: str
    ) -> None:
        said = [{"role": "assistant", **answer}] if answer else []
        good = {"messages": [*user("z"), {"role": "assistant", "content": "x"}]}
        self.keep(tmp_path, {"messages": [*ASK, *said]}, good)
        assert rejected(tmp_path / "out") == [("a.jsonl:1", reason)]
        counts = run(tmp_path / "other", tmp_path / "a.jsonl")
        assert "rejects" not in counts or not counts["rejects"]

    def test_answers_count_for_the_id_only_where_they_are_used(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "completion": answer} for answer in ("x", "y", "x")]
        assert len({record["id"] for record in self.keep(tmp_path, *rows)}) == 2
        assert rejected(tmp_path / "out") == [("a.jsonl:3", "duplicate")]
        counts = run(tmp_path / "other", tmp_path / "a.jsonl")
        assert counts["rejects"] == {"duplicate": 2}
        [reread] = parts(tmp_path / "other")
        run(tmp_path / "asked", write(tmp_path / "b.jsonl", {"prompt": "a"}))
        assert reread["id"] == parts(tmp_path / "asked")[0]["id"]
