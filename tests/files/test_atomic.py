"""A file appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.files.atomic import atomic_write
from eagle3.files.records import write_records


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def fail_halfway(path: Path) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
        raise ValueError("halfway")


def test_after_an_error_the_file_is_unchanged_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="halfway"):
        fail_halfway(path)
    with pytest.raises(TypeError):
        write_records(path, [{"id": 1}, {"id": object()}])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
