"""Records on disk: zstd-compressed JSON lines, and an append-only log that survives a kill.

The bytes of a file depend on its records alone, so that equal content has an equal hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import zstandard

from eagle3.errors import Eagle3Error

Record = dict[str, Any]

# Level 3 packs token ids to about 30% at 200 MB/s a core; higher levels gain little. Part of the file's bytes.
ZSTD_LEVEL = 3


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a `.jsonl.zst` file, in order, in constant memory.

    Raises:
        Eagle3Error: the file is missing, truncated or not JSON; names the file and the line.
    """
    number = 0
    try:
        for line in _lines(path):
            yield orjson.loads(line)
            number += 1
    except FileNotFoundError:
        raise Eagle3Error("a file is missing", where=path, remedy="run the stage that makes it") from None
    except (zstandard.ZstdError, orjson.JSONDecodeError) as error:
        raise Eagle3Error(
            "a file of records is damaged",
            where=f"{path}, line {number + 1}",
            found=error,
            expected="zstd-compressed JSON lines",
            remedy="delete the file and run snakemake again: only this artifact is made anew",
        ) from None


def _lines(path: Path) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    with path.open("rb") as raw:
        while chunk := raw.read(1 << 18):
            *lines, rest = (rest + decompressor.decompress(chunk)).split(b"\n")
            yield from lines
    # zstandard reports a truncated frame only through this flag.
    if rest or not decompressor.eof:
        raise zstandard.ZstdError("the file ends in the middle of a frame")


def write_records(path: Path, records: Iterable[Record]) -> int:
    """Write records as `.jsonl.zst`, whole or not at all; return their number."""
    temporary = path.with_name(path.name + ".tmp")
    count = 0
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    with temporary.open("wb") as raw:
        with compressor.stream_writer(raw, closefd=False) as stream:
            for record in records:
                stream.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
                count += 1
        raw.flush()
        os.fsync(raw.fileno())
    temporary.replace(path)
    return count


def write_json(path: Path, value: object) -> None:
    """Write one JSON document, indented, keys sorted, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    option = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    with temporary.open("wb") as file:
        file.write(orjson.dumps(value, option=option))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read one JSON document.

    Raises:
        Eagle3Error: the file is missing or not JSON; names the file.
    """
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise Eagle3Error("a file is missing", where=path, remedy="run the stage that makes it") from None
    except orjson.JSONDecodeError as error:
        raise Eagle3Error(
            "a JSON file is damaged", where=path, found=error, remedy="delete it and run snakemake again"
        ) from None


class RecordLog:
    """Append-only JSON lines for work in progress: what was appended survives a SIGKILL.

    Opening the log reads what is there and cuts off a torn last line. One writer at a time (the store locks
    the work folder).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._file = path.open("ab+")
        self._file.seek(0)
        good = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self.records.append(orjson.loads(line))
            good += len(line)
        self._file.truncate(good)

    def append(self, *records: Record) -> None:
        """Append records and make them durable before returning."""
        self._file.write(b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.extend(records)

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
