"""A stored sample: where its frames are, in a shard or in the log of a running capture, and how to read them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from eagle3.errors import Eagle3Error
from eagle3.hidden_states import codec
from eagle3.hidden_states.codec import FRAME_ROWS, Encoding

REMEDY = "delete the file and run snakemake again: only this artifact is rebuilt"

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Provenance:
    """What all shards of one capture share."""

    part: str
    """Identity of the capture: hash of the target, the samples and the settings."""
    target_revision: str
    layer_ids: tuple[int, ...]
    """Ascending; the last is the number of layers."""
    hidden_size: int
    encoding: Encoding
    engine: str
    engine_dtype: str
    """The engine's compute dtype; states of a wider one are rounded to bf16."""
    versions: dict[str, str]

    @property
    def aux_layers(self) -> int:
        return len(self.layer_ids) - 1

    def comparable(self) -> dict[str, Any]:
        """Return what must agree between shards that are read together."""
        return {name: value for name, value in vars(self).items() if name not in ("part", "versions")}


class FrameError(Eagle3Error):
    """A frame is damaged."""

    def __init__(self, stored: StoredSample, provenance: Provenance, frame: int, place: Place, found: object) -> None:
        unit = "tokens" if place.state < provenance.aux_layers else "last rows"
        self.frame = frame
        self.place = f"layer {provenance.layer_ids[place.state]}, {unit} {place.start}-{place.stop - 1}"
        self.found = found
        super().__init__(
            "a sample's hidden states are damaged",
            where=f"{stored.path}, sample {stored.id}, {self.place}",
            found=found,
            remedy=REMEDY,
        )


class Place(NamedTuple):
    """Which rows of which state a frame holds."""

    state: int
    """Index into the layer ids."""
    start: int
    stop: int


def places(tokens: int, rows: int, aux_layers: int) -> Iterator[Place]:
    """Yield the places of a sample's frames in their order: the auxiliary states chunk by chunk, then the last."""
    for start in range(0, tokens, FRAME_ROWS):
        for state in range(aux_layers):
            yield Place(state, start, min(start + FRAME_ROWS, tokens))
    for start in range(0, rows, FRAME_ROWS):
        yield Place(aux_layers, start, min(start + FRAME_ROWS, rows))


def count_frames(tokens: int, rows: int, aux_layers: int) -> int:
    """Return the number of frames of a sample."""
    return aux_layers * -(-tokens // FRAME_ROWS) + -(-rows // FRAME_ROWS)


@dataclass(frozen=True)
class StoredSample:
    """One sample in a file: everything except the bytes of its frames. F = number of frames."""

    id: str
    token_ids: Int32s
    """[n]"""
    last_rows: Int32s
    """[m]: positions of the last state's rows, ascending; n - 1, which the teacher check reads, is always the last."""
    next_token: int
    """The engine's own greedy token after the sequence."""
    teacher_token: int
    """argmax(lm_head(norm(last state))); -1 while a capture runs."""
    frame_bytes: Int64s
    """[F]"""
    packed_bytes: Int64s
    """[F]: bytes of the frame's zstd part."""
    checksums: Int64s
    """[F]"""
    path: Path
    offset: int
    """Position of the first frame in the file."""

    @property
    def size(self) -> int:
        return int(self.frame_bytes.sum())

    def checksum(self, part: str) -> int:
        """Return the checksum over everything except the frames."""
        crc = zlib.crc32(f"{part}/{self.id}".encode())
        for array in (self.token_ids, self.last_rows):
            crc = zlib.crc32(array.tobytes(), crc)
        return zlib.crc32(struct.pack("<qq", self.next_token, self.teacher_token), crc)

    def read(self, first: int, stop: int) -> list[memoryview]:
        """Read the payloads of frames `first` to `stop` with one read.

        Raises:
            Eagle3Error: the file is truncated.
        """
        ends = np.cumsum(self.frame_bytes)
        begin, end = (int(ends[frame - 1]) if frame else 0 for frame in (first, stop))
        data = read_at(self.path, self.offset + begin, end - begin)
        bounds = [0, *(ends[first:stop] - begin).tolist()]
        return [data[a:b] for a, b in pairwise(bounds)]


def decode_frames(
    stored: StoredSample, provenance: Provenance, first: int, stop: int, targets: Sequence[codec.Bits]
) -> None:
    """Read frames `first` to `stop` of a sample, check them, and decode each into its target [t, H].

    Raises:
        FrameError: a checksum does not match; names the sample, the layer and the tokens.
        Eagle3Error: the file is truncated.
    """
    where = list(places(len(stored.token_ids), len(stored.last_rows), provenance.aux_layers))
    for number, payload, target in zip(range(first, stop), stored.read(first, stop), targets, strict=True):
        if zlib.crc32(payload, codec.seed(provenance.part, stored.id, number)) != stored.checksums[number]:
            raise FrameError(stored, provenance, number, where[number], "the checksum does not match")
        encoding = provenance.encoding if where[number].state < provenance.aux_layers else "lossless"
        try:
            codec.decode(payload, int(stored.packed_bytes[number]), encoding, target)
        except (ValueError, zstandard.ZstdError) as error:
            raise FrameError(stored, provenance, number, where[number], error) from None


def read_at(path: Path, offset: int, size: int) -> memoryview:
    """Read exactly `size` bytes at `offset`.

    Raises:
        Eagle3Error: the file is missing or truncated.
    """
    # Unlike a bytearray, this is not zeroed first.
    data = np.empty(size, np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < size and (step := file.readinto(data[done:])):
                done += step
    except FileNotFoundError:
        raise Eagle3Error("a hidden-state shard is missing", where=path, remedy=REMEDY) from None
    if done < size:
        raise Eagle3Error(
            "a file of hidden states is truncated",
            where=path,
            found=f"{offset + done:,} bytes",
            expected=f"at least {offset + size:,} bytes",
            remedy=REMEDY,
        )
    return data
