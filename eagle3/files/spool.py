"""Sorting more records than fit in memory, by a hash."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import zstandard

_BUFFER_BYTES = 1 << 18


class Spool:
    """Scratch files, one for each of 256 ranges of the key: each is small enough to be sorted in memory.

    Memory: 64 MiB of buffers, then 1/256 of the data. The order depends on keys and records alone, not on the
    order in which they came. What an earlier, killed run left in the folder is removed.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._buffers: dict[str, bytearray] = {}
        # Level 1: written once, read once.
        self._compressor = zstandard.ZstdCompressor(level=1)

    def add(self, key: str, record: Mapping[str, object]) -> None:
        """Keep a record under `key`, hexadecimal digits that are evenly distributed (a hash)."""
        buffer = self._buffers.setdefault(key[:2], bytearray())
        buffer += b"%s %s\n" % (key.encode(), orjson.dumps(record))
        if len(buffer) >= _BUFFER_BYTES:
            self._flush(key[:2])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield key and record in the order of the keys; equal keys in the order of the records' bytes."""
        for bucket in sorted(self._buffers):
            self._flush(bucket)
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as raw:
                data = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True).read()
            for line in sorted(data.splitlines()):
                key, _, record = line.partition(b" ")
                yield key.decode(), orjson.loads(record)

    def _flush(self, bucket: str) -> None:
        with (self._folder / bucket).open("ab") as file:
            file.write(self._compressor.compress(bytes(self._buffers[bucket])))
        self._buffers[bucket].clear()
