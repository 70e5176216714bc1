"""Every form of a conversation becomes the turns of a user."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.errors import Eagle3Error
from tests.prompts.rows import ASK, CALL, RESULT, SYSTEM, parts, rejected, run, user, write

# What a user may write: anything but nothing, NULs and halves of surrogate pairs.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)


class TestForms:
    @pytest.mark.parametrize(
        ("row", "messages"),
        [
            ({"messages": [*ASK, {"role": "assistant", "content": "..."}]}, ASK),
            ({"messages": [SYSTEM, *ASK]}, [SYSTEM, *ASK]),
            ({"messages": [{"role": "developer", "content": "Be brief."}, *ASK]}, [SYSTEM, *ASK]),
            ({"messages": [{"role": "system", "content": " "}, *ASK]}, ASK),
            ({"conversations": [*ASK, {"role": "assistant", "content": None, "tool_calls": []}]}, ASK),
            (
                {
                    "conversations": [
                        {"from": "system", "value": "Be brief."},
                        {"from": "human", "value": "a"},
                        {"from": "gpt", "value": "x"},
                        {"from": "human", "value": "b"},
                    ]
                },
                [SYSTEM, *user("a", "b")],
            ),
            ({"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}]}, [SYSTEM, *user("a")]),
            ({"system_prompt": "Be brief.", "prompt": "a", "response": "b"}, [SYSTEM, *user("a")]),
            (
                {"conversations": [{"from": "Human", "value": "a"}, {"from": "chatgpt", "value": "x"}]},
                user("a"),
            ),
            (
                {"messages": [SYSTEM, {"role": "developer", "content": "And kind."}, *ASK]},
                [{"role": "system", "content": "Be brief.\n\nAnd kind."}, *ASK],
            ),
            ({"prompt": "a", "completion": "b"}, user("a")),
            ({"prompt": [SYSTEM, *ASK]}, [SYSTEM, *ASK]),
            ({"instruction": "Translate.", "input": "chat", "output": "cat"}, user("Translate.\n\nchat")),
            ({"instruction": "Translate.", "input": "", "output": "cat"}, user("Translate.")),
            ({"turns": ["a", "b"]}, user("a", "b")),
            ({"messages": user("a", "b")}, user("a", "b")),
            ({"messages": [*user("a", "b"), {"role": "assistant", "content": "x"}]}, user("a\n\nb")),
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
                user("a\nb"),
            ),
            ({"messages": user("مرحبا 👩‍👩‍👧 \u202e")}, user("مرحبا 👩‍👩‍👧 \u202e")),
        ],
    )
    def test_every_form_becomes_the_user_turns(
        self, tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]
    ) -> None:
        run(tmp_path / "out", write(tmp_path / "a.jsonl", row))
        assert [record["messages"] for record in parts(tmp_path / "out")] == [messages]

    def test_tools_are_kept_and_count_for_the_id(self, tmp_path: Path) -> None:
        tool = {"type": "function", "function": {"name": "f"}}
        rows = [{"messages": ASK}, {"messages": ASK, "tools": [tool]}, {"messages": ASK, "tools": json.dumps([tool])}]
        run(tmp_path / "out", write(tmp_path / "a.jsonl", *rows))
        assert [record.get("tools") for record in parts(tmp_path / "out")].count([tool]) == 1
        assert rejected(tmp_path / "out") == [("a.jsonl:3", "duplicate")]

    def test_a_conversation_ends_before_the_first_result_of_a_tool(self, tmp_path: Path) -> None:
        rows = [*user("a"), CALL, RESULT, {"role": "assistant", "content": "x"}, *user("b")]
        counts = run(tmp_path / "out", write(tmp_path / "a.jsonl", {"messages": rows}))
        assert [record["messages"] for record in parts(tmp_path / "out")] == [user("a")]
        assert counts["cut at a tool's result"] == 1

    @given(
        texts=st.lists(TEXT, min_size=1, max_size=5),
        system=st.none() | TEXT,
        answered=st.booleans(),
    )
    @settings(max_examples=60)
    def test_every_way_to_write_a_conversation_gives_the_same_one(
        self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], system: str | None, answered: bool
    ) -> None:
        head = [("system", system)] if system is not None else []
        turns = [entry for text in texts for entry in (("user", text), ("assistant", "x"))]
        entries = [*head, *(turn for turn in turns if answered or turn[0] == "user")]
        shares = {"user": "human", "assistant": "gpt"}
        beside = {"system": system} if system is not None else {}
        rows = [
            {"messages": [{"role": role, "content": text} for role, text in entries]},
            {"prompt": [{"role": role, "content": text} for role, text in entries]},
            {"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in entries]},
            {"conversations": [{"from": shares.get(role, role), "value": text} for role, text in entries]},
            {"conversation": [{"from": role, "value": text} for role, text in entries[len(head) :]], **beside},
            {"turns": texts, **beside},
        ]
        tmp_path = tmp_path_factory.mktemp("ways")
        sources = [write(tmp_path / f"{number}.jsonl", row) for number, row in enumerate(rows)]
        for number, row in enumerate(rows):
            polars.DataFrame([row]).write_parquet(tmp_path / f"{number}.parquet")
            sources.append(tmp_path / f"{number}.parquet")
        counts = run(tmp_path / "out", *sources, duplicates="exact")
        [record] = parts(tmp_path / "out")
        expected = [{"role": role, "content": text} for role, text in [*head, *(("user", text) for text in texts)]]
        assert record["messages"] == expected
        assert counts["rejects"] == {"duplicate": 2 * len(rows) - 1}

    def test_ambiguity_names_the_setting(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a.jsonl", {"prompt": "a", "messages": ASK})
        with pytest.raises(Eagle3Error, match=r"(?s)several ways.*a\.jsonl, line 1.*form: messages"):
            run(tmp_path / "out", source)
        run(tmp_path / "out", {"path": str(source), "form": "messages"})
        assert parts(tmp_path / "out")[0]["messages"] == ASK
