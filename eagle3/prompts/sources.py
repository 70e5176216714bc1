"""Sources: files of prompts, found and read row by row.

A fault in a row rejects that row, with a stable code; a fault in a file ends the run.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from eagle3.errors import Eagle3Error, RejectedError
from eagle3.files.find import SUFFIXES

_CHUNK = 1 << 18
_PARQUET_ROWS = 2048


class SourceRow(NamedTuple):
    """One row of a file: its value, or why there is none."""

    number: int
    """Line or row, from 1."""
    value: Any
    fault: RejectedError | None = None


def stem(path: Path) -> str:
    """Return the file's name without the suffixes that say how it is stored."""
    suffix = next((suffix for suffix in sorted(SUFFIXES, key=len) if path.name.endswith(suffix)), path.suffix)
    return path.name.removesuffix(suffix)


def read_rows(path: Path) -> Iterator[SourceRow]:
    """Yield the rows of a source file in constant memory (except `.json`, which is read whole).

    Raises:
        Eagle3Error: the file is missing, unreadable, truncated or of an unknown type.
    """
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet_rows(path)
        elif path.name.endswith(".json"):
            yield from _json_rows(path.read_bytes())
        elif path.name.endswith(SUFFIXES):
            yield from _json_lines(_chunks(path))
        else:
            raise Eagle3Error(
                "unknown file type of a prompt source",
                where=path,
                found=path.suffix or "no suffix",
                expected=f"one of {', '.join(SUFFIXES)}",
            )
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise Eagle3Error(
            "a prompt source cannot be read",
            where=path,
            found=error,
            remedy="check that the file is there, readable and complete",
        ) from None


def _chunks(path: Path) -> Iterator[bytes]:
    if path.name.endswith(".gz"):
        with gzip.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
        return
    with path.open("rb") as raw:
        if path.name.endswith(".zst"):
            yield from _decompressed(raw.read, path)
        else:
            while chunk := raw.read(_CHUNK):
                yield chunk


def _decompressed(read: Callable[[int], bytes], path: Path) -> Iterator[bytes]:
    """Decompress any number of zstd frames; zstandard itself does not report a truncated last one."""
    frame = None
    while chunk := read(_CHUNK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise zstandard.ZstdError(f"{path.name} ends in the middle of a frame")


def _json_lines(chunks: Iterator[bytes]) -> Iterator[SourceRow]:
    number, rest = 0, [b""]
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        rest.append(first)
        if not more:
            continue
        for line in (b"".join(rest), *more[:-1]):
            number += 1
            yield from _json_line(number, line)
        rest = [more[-1]]
    yield from _json_line(number + 1, b"".join(rest))


def _json_line(number: int, line: bytes) -> Iterator[SourceRow]:
    """Yield the line's row; none for a blank line."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if not line.strip():
        return
    try:
        yield SourceRow(number, orjson.loads(line))
    except orjson.JSONDecodeError as error:
        yield _diagnose(number, line, str(error))


def _diagnose(number: int, line: bytes, problem: str) -> SourceRow:
    """Say why a line is not JSON; orjson has one message for all causes."""
    try:
        value = json.loads(line.decode())
        orjson.dumps(value)
    except UnicodeDecodeError as error:
        return SourceRow(number, line.decode(errors="replace"), RejectedError("not_utf8", str(error)))
    except (ValueError, RecursionError):
        # Besides syntax errors: numbers with more digits than Python converts.
        return SourceRow(number, line.decode(), RejectedError("not_json", problem))
    except TypeError:
        # Valid JSON whose strings no encoder accepts.
        return SourceRow(number, line.decode(), RejectedError("unpaired_surrogate"))
    return SourceRow(number, value)


def _json_rows(data: bytes) -> Iterator[SourceRow]:
    """Rows of a `.json` file: an array, or JSON lines under the wrong suffix."""
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _json_lines(iter([data]))
        return
    try:
        values = orjson.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        try:
            # One row with a string that no encoder accepts must not cost the whole file.
            for number, value in enumerate(json.loads(data.decode("utf-8-sig")), start=1):
                yield from _json_line(number, json.dumps(value).encode())
        except (ValueError, RecursionError):
            line = data.count(b"\n", 0, error.pos) + 1
            raise EOFError(f"no valid JSON array: {error}, near line {line}") from None
        return
    yield from (SourceRow(number, value) for number, value in enumerate(values, start=1))


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    import polars

    try:
        frame = polars.scan_parquet(path, glob=False)
        total = frame.select(polars.len()).collect().item()
        for start in range(0, total, _PARQUET_ROWS):
            rows = frame.slice(start, _PARQUET_ROWS).collect().iter_rows(named=True)
            yield from (SourceRow(number, value) for number, value in enumerate(rows, start=start + 1))
    except polars.exceptions.PolarsError as error:
        raise OSError(error) from None
