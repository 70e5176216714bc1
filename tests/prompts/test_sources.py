"""Every kind of file gives its rows, and its faults are named."""

import gzip
from pathlib import Path
from typing import Any

import orjson
import polars
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.prompts import sources
from tests.prompts.rows import ASK, SYSTEM, lines, parts, rejected, run, user, write


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
            ("a.csv", b"a,b\n", r"(?s)unknown file type of a prompt source.*a\.csv.*\.jsonl"),
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

    def test_a_source_of_duplicates_is_not_an_error(self, tmp_path: Path) -> None:
        first, second = (write(tmp_path / name, {"turns": ["a"]}) for name in ("a.jsonl", "b.jsonl"))
        counts = run(tmp_path / "out", first, second)
        assert counts["prompts"] == 1
        assert counts["rejects"] == {"duplicate": 1}
