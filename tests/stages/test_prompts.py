from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import polars
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.config.prompts import PromptsSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_json, read_records
from eagle3.prompts import sources
from eagle3.stages import prompts


def lines(*rows: object) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(lines(*rows))
    return path


def run(folder: Path, *sources: Any, **values: Any) -> dict[str, Any]:
    """Make prompts from paths or source settings."""
    entries = [source if isinstance(source, dict) else {"path": str(source)} for source in sources]
    chosen = PromptsSettings.model_validate({"sources": entries, **values})
    folder.mkdir(exist_ok=True, parents=True)
    return prompts.make(chosen, sources=chosen.outside_files(), folder=folder)


def parts(folder: Path) -> list[Record]:
    return [record for path in sorted(folder.glob("part-*")) for record in read_records(path)]


def rejected(folder: Path) -> list[tuple[str, str]]:
    return [(record["id"], record["reason"]) for record in read_records(folder / "rejects.jsonl.zst")]


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


ASK = user("What is a prime number?")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


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


class TestGivenAnswers:
    """`answers: as_is` keeps what the assistant said."""

    def keep(self, tmp_path: Path, *rows: object) -> list[Record]:
        path = write(tmp_path / "a.jsonl", *rows)
        run(tmp_path / "out", {"path": str(path), "answers": "as_is"}, user_of_the_other_mode(tmp_path))
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
        [anew] = parts(tmp_path / "other")
        run(tmp_path / "asked", write(tmp_path / "b.jsonl", {"prompt": "a"}))
        assert anew["id"] == parts(tmp_path / "asked")[0]["id"]


def user_of_the_other_mode(tmp_path: Path) -> Path:
    return write(tmp_path / "other.jsonl", {"turns": ["something else"]})


class TestFiles:
    ROWS = ({"turns": ["a"]}, {"turns": ["b"]})

    def expect(self, tmp_path: Path, source: object) -> None:
        run(tmp_path / "out", source)
        found = {record["messages"][0]["content"] for record in parts(tmp_path / "out")}
        assert found == {"a", "b"}

    def test_jsonl_with_bom_blank_lines_and_no_last_newline(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(self.ROWS[0]) + b"\r\n\n" + lines(self.ROWS[1])[:-1])
        self.expect(tmp_path, tmp_path / "a.jsonl")

    def test_gzip(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(*self.ROWS)))
        self.expect(tmp_path, tmp_path / "a.jsonl.gz")

    def test_zstd_of_several_frames(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(lines(row)) for row in self.ROWS))
        self.expect(tmp_path, tmp_path / "a.jsonl.zst")

    def test_json_array_and_json_lines_named_json(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(orjson.dumps(self.ROWS))
        self.expect(tmp_path, tmp_path / "a.json")
        write(tmp_path / "b.json", *self.ROWS)
        self.expect(tmp_path, tmp_path / "b.json")

    def test_a_json_array_with_one_bad_string_loses_one_row(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(b'[{"turns": ["a"]},\n{"turns": ["\\udc00"]}, {"turns": ["b"]}]')
        self.expect(tmp_path, tmp_path / "a.json")
        assert rejected(tmp_path / "out") == [("a.json:2", "unpaired_surrogate")]

    @given(
        rows=st.lists(st.fixed_dictionaries({"prompt": st.text(st.characters(exclude_categories=["Cs"]))}), max_size=8),
        chunk=st.integers(1, 9),
        end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
        pack=st.sampled_from([("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)]),
        data=st.data(),
    )
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_rows_are_read_whole_wherever_chunks_and_frames_end(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        rows: list[Any],
        chunk: int,
        end: bytes,
        pack: Any,
        data: Any,
    ) -> None:
        monkeypatch.setattr(sources, "_CHUNK", chunk)
        text = b"".join(orjson.dumps(row) + end for row in rows)
        middle = data.draw(st.integers(0, len(text)))
        suffix, compress = pack
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(text[:middle]) + compress(text[middle:]))
        read = list(sources.read_rows(path))
        assert [row.value for row in read] == rows
        assert [row.number for row in read] == [1 + number * end.count(b"\n") for number in range(len(rows))]

    def test_parquet(self, tmp_path: Path) -> None:
        rows = [{"conversations": [{"from": "human", "value": text, "weight": None}]} for text in "ab"]
        polars.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
        self.expect(tmp_path, tmp_path / "a.parquet")

    def test_folder_and_glob(self, tmp_path: Path) -> None:
        (tmp_path / "in" / "deep").mkdir(parents=True)
        write(tmp_path / "in" / "x.jsonl", self.ROWS[0])
        write(tmp_path / "in" / "deep" / "y.jsonl", self.ROWS[1])
        (tmp_path / "in" / "README.md").write_text("not data")
        self.expect(tmp_path, tmp_path / "in")
        assert {record["source"] for record in parts(tmp_path / "out")} == {"in"}
        self.expect(tmp_path, tmp_path / "in" / "**" / "*.jsonl")
        assert {record["source"] for record in parts(tmp_path / "out")} == {"x", "y"}


class TestFaults:
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            (b'{"messages": [', "not_json"),
            (b"[" * 100_000, "not_json"),
            (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "not_utf8"),
            (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "unpaired_surrogate"),
            (lines({"messages": user("a\0b")}), "nul_character"),
            (lines({"messages": user("")}), "empty_message"),
            (lines({"messages": user("a", " \n")}), "empty_message"),
            (lines({"messages": [{"role": "user", "content": None}]}), "empty_message"),
            (lines({"messages": []}), "wrong_form"),
            (lines({"messages": "hello"}), "wrong_form"),
            (lines({"prompt": "a"}), "wrong_form"),
            (lines(["a"]), "wrong_form"),
            (lines({"messages": [{"role": "assistant", "content": "a"}, *ASK]}), "role_order"),
            (lines({"messages": [*ASK, SYSTEM]}), "role_order"),
            (lines({"messages": [SYSTEM]}), "no_user_message"),
            (lines({"messages": [{"role": "narrator", "content": "a"}]}), "unknown_role"),
            (lines({"messages": [*ASK, {"role": "tool", "content": "4"}]}), "tool_messages"),
            (
                lines({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
                "not_text",
            ),
            (lines({"messages": ASK, "tools": "{"}), "bad_tools"),
            (lines({"messages": user("x" * 1001)}), "too_long"),
            (lines({"messages": ASK}), "duplicate"),
            (lines({"messages": user("what is  a PRIME number?")}), "duplicate_normalised"),
        ],
    )
    def test_a_faulty_row_is_rejected_with_its_line_and_record(self, tmp_path: Path, row: bytes, reason: str) -> None:
        (tmp_path / "a.jsonl").write_bytes(
            lines({"messages": ASK}) + row.strip() + b"\n" + lines({"messages": user("b")})
        )
        counts = run(tmp_path / "out", tmp_path / "a.jsonl", max_chars=1000)
        assert rejected(tmp_path / "out") == [("a.jsonl:2", reason)]
        assert counts["prompts"] == 2
        assert counts["rows"] == 3
        assert counts["rejects"] == {reason: 1}
        [record] = read_records(tmp_path / "out" / "rejects.jsonl.zst")
        assert record["record"]

    def test_exact_duplicates_only_on_request(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a.jsonl", {"turns": ["a"]}, {"turns": ["A"]}, {"turns": ["a"]})
        run(tmp_path / "out", source, duplicates="exact")
        assert rejected(tmp_path / "out") == [("a.jsonl:3", "duplicate")]

    def test_a_long_message_is_accepted(self, tmp_path: Path) -> None:
        run(tmp_path / "out", write(tmp_path / "a.jsonl", {"turns": ["wort " * 40_000]}))
        assert len(parts(tmp_path / "out")[0]["messages"][0]["content"]) == 200_000

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", b"", "is empty"),
            ("a.jsonl", b"\n\n", "is empty"),
            ("a.jsonl", "größe\n".encode("utf-16"), r"(?s)no usable prompt.*a\.jsonl, line 1: not_utf8"),
            ("a.jsonl", b"id,text\n1,hello\n", r"(?s)no usable prompt.*line 1: not_json"),
            ("a.jsonl", lines({"question": "a"}), r"(?s)no usable prompt.*unknown_form: keys: question"),
            ("a.json", b"[{}, ", r"(?s)cannot be read.*a\.json.*line 1"),
            ("a.parquet", b"PAR1 but not really", r"(?s)cannot be read.*a\.parquet"),
            ("a.jsonl.gz", b"not gzip", r"(?s)cannot be read.*a\.jsonl\.gz"),
            ("a.jsonl.gz", gzip.compress(b"x" * 10_000, mtime=0)[:-9], r"(?s)cannot be read.*a\.jsonl\.gz"),
            ("a.jsonl.zst", zstandard.compress(lines({"turns": ["a"]}))[:-3], r"(?s)cannot be read.*frame"),
            ("a.csv", b"a,b\n", r"(?s)kind that is not known.*a\.csv.*\.jsonl"),
        ],
    )
    def test_a_faulty_file_is_an_error_that_names_it(
        self, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Eagle3Error, match=message):
            run(tmp_path / "out", tmp_path / name)

    def test_a_missing_source(self, tmp_path: Path) -> None:
        with pytest.raises(Eagle3Error, match=r"(?s)matches no file.*nowhere\.jsonl"):
            run(tmp_path / "out", tmp_path / "nowhere.jsonl")

    def test_a_source_of_duplicates_is_no_error(self, tmp_path: Path) -> None:
        first, second = (write(tmp_path / name, {"turns": ["a"]}) for name in ("a.jsonl", "b.jsonl"))
        counts = run(tmp_path / "out", first, second)
        assert counts["prompts"] == 1
        assert counts["rejects"] == {"duplicate": 1}


def many(path: Path, texts: Sequence[str]) -> Path:
    return write(path, *({"turns": [text]} for text in texts))


def part_bytes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("part-*"))]


class TestParts:
    def test_one_more_prompt_changes_one_part(self, tmp_path: Path) -> None:
        texts = [f"question {number}" for number in range(100)]
        run(tmp_path / "x", many(tmp_path / "a.jsonl", texts), parts=5)
        run(tmp_path / "y", many(tmp_path / "a.jsonl", [*texts, "another"]), parts=5)
        changed = [a != b for a, b in zip(part_bytes(tmp_path / "x"), part_bytes(tmp_path / "y"), strict=True)]
        assert sum(changed) == 1
        assert read_json(tmp_path / "x" / "stats.json")["parts"] != read_json(tmp_path / "y" / "stats.json")["parts"]

    def test_more_parts_than_prompts_gives_empty_ones(self, tmp_path: Path) -> None:
        run(tmp_path / "out", many(tmp_path / "a.jsonl", ["a", "b"]), parts=7)
        assert len(list((tmp_path / "out").glob("part-*"))) == 7
        assert len(parts(tmp_path / "out")) == 2

    @given(texts=st.lists(st.text(min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=30), data=st.data())
    @settings(max_examples=40)
    def test_the_order_of_rows_does_not_matter_and_every_row_is_counted(
        self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
    ) -> None:
        tmp_path = tmp_path_factory.mktemp("parts")
        shuffled = data.draw(st.permutations(texts))
        for name, order in (("x", texts), ("y", shuffled)):
            (tmp_path / name).mkdir()
            many(tmp_path / name / "a.jsonl", order)
        if all("\0" in text for text in texts):
            return
        first = run(tmp_path / "x", tmp_path / "x" / "a.jsonl", parts=3, duplicates="exact")
        second = run(tmp_path / "y", tmp_path / "y" / "a.jsonl", parts=3, duplicates="exact")
        assert part_bytes(tmp_path / "x") == part_bytes(tmp_path / "y")
        assert first == second
        assert first["rows"] == len(texts) == first["prompts"] + sum(first["rejects"].values())


class TestShares:
    TEXTS = tuple(f"question {number}" for number in range(200))

    def test_limit_takes_the_same_ones_whatever_else_there_is(self, tmp_path: Path) -> None:
        source = {"path": str(many(tmp_path / "a.jsonl", self.TEXTS)), "limit": 20}
        other = many(tmp_path / "b.jsonl", [f"other {number}" for number in range(50)])
        counts = run(tmp_path / "x", source)
        assert counts["prompts"] == 20
        assert counts["not taken"] == 180
        run(tmp_path / "y", source, other)
        taken = {record["id"] for record in parts(tmp_path / "x")}
        assert taken == {record["id"] for record in parts(tmp_path / "y") if record["source"] == "a"}
        run(tmp_path / "z", {**source, "limit": 40})
        assert taken < {record["id"] for record in parts(tmp_path / "z")}

    def test_weight_keeps_a_share_and_the_seed_chooses(self, tmp_path: Path) -> None:
        source = {"path": str(many(tmp_path / "a.jsonl", self.TEXTS)), "weight": 0.3}
        counts = [run(tmp_path / str(seed), source, seed=seed)["prompts"] for seed in range(4)]
        assert all(30 < count < 90 for count in counts)
        assert len({tuple(record["id"] for record in parts(tmp_path / str(seed))) for seed in range(4)}) == 4


def test_a_second_run_in_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    source = many(tmp_path / "a.jsonl", ["a", "b", "A"])
    run(tmp_path / "out", source)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")}
    (tmp_path / "out" / "part-0.jsonl.zst").unlink()
    (tmp_path / "out" / ".rejects.jsonl.zst.tmp").write_bytes(b"torn")
    run(tmp_path / "out", source)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")} == before
