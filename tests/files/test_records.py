"""Records on disk: equal content has equal bytes, and damage is never taken for data."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import Eagle3Error
from eagle3.files.records import RecordLog, read_json, read_records, write_json, write_records

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=8,
)
records = st.lists(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), values, max_size=4), max_size=20)


@given(records)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("records") / "a.jsonl.zst"
    assert write_records(path, rows) == len(rows)
    assert list(read_records(path)) == rows
    first = path.read_bytes()
    write_records(path, iter(rows))
    assert path.read_bytes() == first


@given(data=st.data())
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.jsonl.zst"
    rows = [{"id": i, "text": "some text " * i} for i in range(30)]
    write_records(path, rows)
    content = path.read_bytes()
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    else:
        position = data.draw(st.integers(0, len(content) - 1))
        flipped = content[position] ^ (1 << data.draw(st.integers(0, 7)))
        path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
    found: object
    try:
        found = list(read_records(path))
    except Eagle3Error as error:
        found = str(error)
    assert found == rows or str(path) in str(found)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"none\.jsonl\.zst"):
        list(read_records(tmp_path / "none.jsonl.zst"))
    with pytest.raises(Eagle3Error, match=r"none\.json"):
        read_json(tmp_path / "none.json")


def test_json_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [1.5, None]})
    write_json(tmp_path / "b.json", {"a": [1.5, None], "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"a": [1.5, None], "b": 1}


def test_a_log_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom eagle3.files.records import RecordLog\n"
        "log = RecordLog(Path(sys.argv[1]))\nlog.append({'n': 1}, {'n': 2})\n"
        'log._file.write(b\'{"n": 3, "te\')\nlog._file.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n'
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with RecordLog(path) as log:
        assert log.records == [{"n": 1}, {"n": 2}]
        log.append({"n": 3})
    with RecordLog(path) as log:
        assert log.records == [{"n": 1}, {"n": 2}, {"n": 3}]
