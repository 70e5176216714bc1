"""The shard file: one safetensors file that holds many samples; `docs/hidden-states.md` is its specification.

    header      JSON of safetensors; its metadata holds the provenance
    index       small tensors: the samples' ids, and where each frame of each sample is
    token_ids, last_rows, frames

Every byte is covered by a checksum: one for header and index, checked at opening; one per sample for token ids and
rows; one per frame. Checksums of samples and frames start from the sample's identity, so valid bytes in the wrong
place are detected, too.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from eagle3.errors import Eagle3Error
from eagle3.hidden_states.codec import FRAME_ROWS
from eagle3.hidden_states.stored_sample import REMEDY, Int32s, Int64s, Provenance, StoredSample, read_at

FORMAT = "eagle3-hidden-states-1"
_INDEX = ("token_end", "row_end", "frame_end", "next_token", "teacher_token", "sample_checksum")
_FRAME_INDEX = ("frame_byte_end", "frame_packed_bytes", "frame_checksum")
_NAMES = ("checksum", *_INDEX, *_FRAME_INDEX, "sample_ids", "token_ids", "last_rows", "frames")
_DTYPES = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_LAYER_MEANING = (
    "layer i: the residual stream entering layer i; the last one: the last layer's output, before the final norm"
)
_COPY_BYTES = 1 << 24


def damaged(path: Path, found: object) -> Eagle3Error:
    """Return the error for a shard whose header or index is damaged."""
    return Eagle3Error("a hidden-state shard is damaged", where=path, found=found, remedy=REMEDY)


class Shard:
    """An open shard: header and index in memory (about 150 bytes a sample and 24 a frame), the rest on disk.

    Raises:
        Eagle3Error: the file is not a shard, is truncated, or its header or index is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        prefix = bytes(read_at(path, 0, 8))
        length = int.from_bytes(prefix, "little")
        size = path.stat().st_size
        if length > size - 8:
            raise damaged(path, "the header's length is beyond the end of the file")
        head = prefix + bytes(read_at(path, 8, length))
        try:
            header = orjson.loads(head[8:])
            metadata: dict[str, str] = header.pop("__metadata__")
            if metadata["format"] != FORMAT:
                raise damaged(path, f"format {metadata['format']!r}, this version reads {FORMAT!r}")
            self._data = {name: 8 + length + header[name]["data_offsets"][0] for name in _NAMES}
            end = 8 + length + header["frames"]["data_offsets"][1]
            sizes = {name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in _NAMES}
            self.number, self.shards = int(metadata["shard"]), int(metadata["shards"])
            self.provenance = _parse_provenance(metadata)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise damaged(path, f"header: {error!r}") from None
        if size != end:
            raise Eagle3Error(
                "a file of hidden states is truncated" if size < end else "a hidden-state shard is too long",
                where=path,
                found=f"{size:,} bytes",
                expected=f"{end:,} bytes",
                remedy=REMEDY,
            )
        self._load_index(head, sizes)

    def _load_index(self, head: bytes, sizes: dict[str, int]) -> None:
        begin, stop = self._data["checksum"], self._data["token_ids"]
        index = bytes(read_at(self.path, begin, stop - begin))
        if zlib.crc32(index[8:], zlib.crc32(head)) != int.from_bytes(index[:8], "little"):
            raise damaged(self.path, "the checksum of header and index does not match")
        columns = {}
        for name in (*_INDEX, *_FRAME_INDEX):
            at = self._data[name] - begin
            columns[name] = np.frombuffer(index, "<i8", sizes[name] // 8, at)
        self._columns = columns
        at = self._data["sample_ids"] - begin
        self.ids = index[at : at + sizes["sample_ids"]].decode().rstrip("\0").split("\n")[:-1]
        self.token_ends: Int64s = columns["token_end"]
        self.tokens = np.diff(self.token_ends, prepend=0)
        """[N]: tokens of each sample."""

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, number: int) -> StoredSample:
        """Return a sample by its number in the shard.

        Raises:
            Eagle3Error: the file is truncated, or the sample's token ids are damaged.
        """
        tokens, rows, frames = (self._slice(name, number) for name in ("token_end", "row_end", "frame_end"))
        ends = self._columns["frame_byte_end"]
        begin = int(ends[frames.start - 1]) if frames.start else 0
        found = StoredSample(
            id=self.ids[number],
            token_ids=self._int32s("token_ids", tokens),
            last_rows=self._int32s("last_rows", rows),
            next_token=int(self._columns["next_token"][number]),
            teacher_token=int(self._columns["teacher_token"][number]),
            frame_bytes=np.diff(ends[frames], prepend=begin),
            packed_bytes=self._columns["frame_packed_bytes"][frames],
            checksums=self._columns["frame_checksum"][frames],
            path=self.path,
            offset=self._data["frames"] + begin,
        )
        if found.checksum(self.provenance.part) != self._columns["sample_checksum"][number]:
            raise Eagle3Error(
                "a sample's token ids or rows are damaged",
                where=f"{self.path}, sample {found.id}",
                remedy=REMEDY,
            )
        return found

    def _slice(self, name: str, number: int) -> slice:
        ends = self._columns[name]
        return slice(int(ends[number - 1]) if number else 0, int(ends[number]))

    def _int32s(self, name: str, part: slice) -> Int32s:
        data = read_at(self.path, self._data[name] + 4 * part.start, 4 * (part.stop - part.start))
        return np.frombuffer(data, "<i4")


def _parse_provenance(metadata: dict[str, str]) -> Provenance:
    if int(metadata["frame_rows"]) != FRAME_ROWS or metadata["encoding"] not in ("lossless", "fp8"):
        raise ValueError(f"frames of {metadata['frame_rows']} rows, encoding {metadata['encoding']}")
    return Provenance(
        part=metadata["part"],
        target_revision=metadata["target_revision"],
        layer_ids=tuple(orjson.loads(metadata["layer_ids"])),
        hidden_size=int(metadata["hidden_size"]),
        encoding="fp8" if metadata["encoding"] == "fp8" else "lossless",
        engine=metadata["engine"],
        engine_dtype=metadata["engine_dtype"],
        versions=orjson.loads(metadata["versions"]),
    )


def write_shard(path: Path, provenance: Provenance, number: int, shards: int, samples: Sequence[StoredSample]) -> None:
    """Write a shard from samples in other files, and make it durable; the caller renames it.

    Equal samples give equal bytes, in any order.
    """
    samples = sorted(samples, key=lambda stored: stored.id)
    tensors = _index_of(provenance, samples)
    metadata = {
        "format": FORMAT,
        "part": provenance.part,
        "shard": str(number),
        "shards": str(shards),
        "target_revision": provenance.target_revision,
        "layer_ids": orjson.dumps(provenance.layer_ids).decode(),
        "layer_meaning": _LAYER_MEANING,
        "hidden_size": str(provenance.hidden_size),
        "encoding": provenance.encoding,
        "dtype": "bfloat16",
        "frame_rows": str(FRAME_ROWS),
        "engine": provenance.engine,
        "engine_dtype": provenance.engine_dtype,
        "versions": orjson.dumps(provenance.versions, option=orjson.OPT_SORT_KEYS).decode(),
    }
    total = sum(stored.size for stored in samples)
    head = _header(metadata, tensors, total)
    index = b"".join(tensors[name].tobytes() for name in _NAMES[1:11])
    with path.open("wb") as file:
        file.write(head)
        file.write(struct.pack("<q", zlib.crc32(index, zlib.crc32(head))))
        file.write(index)
        for name in ("token_ids", "last_rows"):
            file.write(tensors[name].tobytes())
        for stored in samples:
            _copy(stored, file)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # Drop the cached pages, so that the read-back reads what the disk has.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _index_of(provenance: Provenance, samples: Sequence[StoredSample]) -> dict[str, NDArray[Any]]:
    """Return the tensors in their order, except `frames`."""

    def join(arrays: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)

    def ends(counts: list[int]) -> NDArray[Any]:
        return np.cumsum(np.array(counts, "<i8"), dtype="<i8")

    ids = "".join(f"{stored.id}\n" for stored in samples).encode()
    ids += bytes(-len(ids) % 8)
    return {
        "checksum": np.empty(1, "<i8"),
        "token_end": ends([len(stored.token_ids) for stored in samples]),
        "row_end": ends([len(stored.last_rows) for stored in samples]),
        "frame_end": ends([len(stored.frame_bytes) for stored in samples]),
        "next_token": np.array([stored.next_token for stored in samples], "<i8"),
        "teacher_token": np.array([stored.teacher_token for stored in samples], "<i8"),
        "sample_checksum": np.array([stored.checksum(provenance.part) for stored in samples], "<i8"),
        "frame_byte_end": np.cumsum(join([stored.frame_bytes for stored in samples], "<i8"), dtype="<i8"),
        "frame_packed_bytes": join([stored.packed_bytes for stored in samples], "<i8"),
        "frame_checksum": join([stored.checksums for stored in samples], "<i8"),
        "sample_ids": np.frombuffer(ids, "u1"),
        "token_ids": join([stored.token_ids for stored in samples], "<i4"),
        "last_rows": join([stored.last_rows for stored in samples], "<i4"),
    }


def _header(metadata: dict[str, str], tensors: dict[str, NDArray[Any]], frames: int) -> bytes:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    header["frames"] = {"dtype": "U8", "shape": [frames], "data_offsets": [offset, offset + frames]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _copy(stored: StoredSample, file: BinaryIO) -> None:
    with stored.path.open("rb") as source:
        source.seek(stored.offset)
        left = stored.size
        while left:
            block = source.read(min(left, _COPY_BYTES))
            if not block:
                raise damaged(stored.path, f"sample {stored.id} is truncated")
            file.write(block)
            left -= len(block)
