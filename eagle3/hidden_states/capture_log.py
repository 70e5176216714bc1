"""Finished samples of a running capture: append-only logs, one per shard.

    .capture/provenance.json    of all logs
    .capture/shard-{i}.log      one record per sample, in order of arrival

A record is a prefix (magic, size and CRC of its head), the head (JSON: the sample's identity and the sizes of
its frames) and the frames, exactly as in the shard. Incomplete records, which a kill, a full disk or a power cut can
leave behind, are recognised and their samples recaptured; all others are kept.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson

from eagle3.files.records import read_json, write_json
from eagle3.hidden_states.codec import Frame
from eagle3.hidden_states.codec import seed as frame_seed
from eagle3.hidden_states.stored_sample import Int32s, Provenance, StoredSample, count_frames

FOLDER = ".capture"
_MAGIC = b"\x93EAGLE3\n"
_PREFIX = struct.Struct("<8sII")
# A power cut loses at most what was appended since the last sync; a kill loses nothing.
_SYNC_SECONDS = 1.0
_SEARCH_BYTES = 1 << 20


def log_path(folder: Path, number: int) -> Path:
    """Return the path of a shard's log in the scratch folder."""
    return folder / f"shard-{number}.log"


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the provenance of the logs into the scratch folder."""
    write_json(folder / "provenance.json", vars(provenance))


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of the logs in a scratch folder; None if nothing was captured yet."""
    path = folder / "provenance.json"
    if not path.exists():
        return None
    value = read_json(path)
    return Provenance(**{**value, "layer_ids": tuple(value["layer_ids"])})


class CaptureLog:
    """The log of one shard, open for appending.

    Args:
        path: the log; its records are checked, and a torn end is cut off.
        part: see `Provenance.part`.
        aux_layers: number of auxiliary states.
    """

    def __init__(self, path: Path, part: str, aux_layers: int) -> None:
        self.path = path
        self._part = part
        self.samples: dict[str, StoredSample] = {}
        end = 0
        for stored in scan(path, aux_layers):
            if frames_intact(stored, part):
                self.samples[stored.id] = stored
            end = stored.offset + stored.size
        # Unbuffered: after a failed write, no data is left that could be written later.
        self._file = path.open("ab", buffering=0)
        self._file.truncate(end)
        self._end = end
        self._synced = time.monotonic()

    def append(
        self,
        sample: str,
        token_ids: Int32s,
        last_rows: Int32s,
        next_token: int,
        frames: Sequence[Frame],
    ) -> None:
        """Append one finished sample, which then survives a kill.

        Raises:
            OSError: the disk is full; the log is unchanged.
        """
        head = orjson.dumps(
            {
                "id": sample,
                "next_token": next_token,
                "token_ids": token_ids,
                "last_rows": last_rows,
                "frames": [[len(packed) + len(raw), len(packed), checksum] for packed, raw, checksum in frames],
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        begin = self._end
        try:
            self._write(_PREFIX.pack(_MAGIC, len(head), zlib.crc32(head)) + head)
            for packed, raw, _ in frames:
                self._write(packed)
                self._write(raw)
            if time.monotonic() > self._synced + _SYNC_SECONDS:
                self.sync()
        except OSError:
            os.ftruncate(self._file.fileno(), begin)
            self._end = begin
            raise
        self.samples[sample] = _parse_head(self.path, head, begin + _PREFIX.size + len(head))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = self._file.write(view)
            self._end += done
            view = view[done:]

    def sync(self) -> None:
        """Make the appended samples survive a power cut."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the log: its samples are in a verified shard."""
        self.close()
        self.path.unlink()


def scan(path: Path, aux_layers: int) -> Iterator[StoredSample]:
    """Yield the samples of a log, skipping damaged ones; the log may be growing.

    Frames are not read; `frames_intact` checks them.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = path.stat().st_size
        at = 0
        while (at := _next_record(file, at)) >= 0:
            file.seek(at)
            prefix = file.read(_PREFIX.size)
            _, length, crc = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (b"", 0, -1)
            head = file.read(length)
            if zlib.crc32(head) == crc:
                stored = _parse_head(path, head, file.tell())
                frames = count_frames(len(stored.token_ids), len(stored.last_rows), aux_layers)
                if stored.offset + stored.size <= size and len(stored.frame_bytes) == frames:
                    yield stored
                    at = stored.offset + stored.size
                    continue
            at += 1


def _next_record(file: BinaryIO, at: int) -> int:
    """Return where the next record may begin, `at` in an undamaged log; -1 at the end."""
    file.seek(at)
    block = file.read(len(_MAGIC))
    while len(block) >= len(_MAGIC):
        if (found := block.find(_MAGIC)) >= 0:
            return at + found
        at += len(block) - len(_MAGIC) + 1
        file.seek(at)
        block = file.read(_SEARCH_BYTES)
    return -1


def frames_intact(stored: StoredSample, part: str) -> bool:
    """Whether the checksum of every frame of a sample matches."""
    payloads = stored.read(0, len(stored.checksums))
    return all(
        zlib.crc32(payload, frame_seed(part, stored.id, number)) == checksum
        for number, (payload, checksum) in enumerate(zip(payloads, stored.checksums, strict=True))
    )


def _parse_head(path: Path, head: bytes, offset: int) -> StoredSample:
    record = orjson.loads(head)
    frames = np.array(record["frames"], np.int64).reshape(-1, 3)
    return StoredSample(
        id=record["id"],
        token_ids=np.array(record["token_ids"], "<i4"),
        last_rows=np.array(record["last_rows"], "<i4"),
        next_token=record["next_token"],
        teacher_token=-1,
        frame_bytes=frames[:, 0],
        packed_bytes=frames[:, 1],
        checksums=frames[:, 2],
        path=path,
        offset=offset,
    )
