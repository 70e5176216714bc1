"""The page `docs/hidden-states.md` suffices: a reader written from it alone gives the same states."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import zstandard
from safetensors.numpy import load_file

from eagle3.hidden_states import codec
from eagle3.hidden_states.reader import HiddenStateReader
from tests.hidden_states.conftest import H, Make


def read_shard(path: Path) -> dict[str, dict[str, Any]]:
    """Read a shard with nothing of the package: sample id -> token_ids, last_rows, and each state as float32."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    meta = header.pop("__metadata__")
    types = {"I64": "<i8", "I32": "<i4", "U8": "u1"}
    t = {
        name: np.frombuffer(data, types[one["dtype"]], math.prod(one["shape"]), begin + one["data_offsets"][0])
        for name, one in header.items()
    }
    index = data[begin + 8 : begin + header["token_ids"]["data_offsets"][0]]
    assert zlib.crc32(index, zlib.crc32(data[:begin])) == t["checksum"][0]
    width, layers = int(meta["hidden_size"]), json.loads(meta["layer_ids"])
    ids = t["sample_ids"].tobytes().rstrip(b"\0").decode().split("\n")[:-1]

    def part(ends: str, k: int) -> slice:
        return slice(t[ends][k - 1] if k else 0, t[ends][k])

    samples = {}
    for k, sample in enumerate(ids):
        tokens, rows = t["token_ids"][part("token_end", k)], t["last_rows"][part("row_end", k)]
        crc = zlib.crc32(tokens.tobytes() + rows.tobytes(), zlib.crc32(f"{meta['part']}/{sample}".encode()))
        crc = zlib.crc32(t["next_token"][k].tobytes() + t["teacher_token"][k].tobytes(), crc)
        assert crc == t["sample_checksum"][k]
        states = [np.empty((len(tokens), width), "f4") for _ in layers[:-1]] + [np.empty((len(rows), width), "f4")]
        places = [(layer, at) for at in range(0, len(tokens), 256) for layer in range(len(layers) - 1)]
        places += [(len(layers) - 1, at) for at in range(0, len(rows), 256)]
        frames = part("frame_end", k)
        for number, (layer, at) in enumerate(places):
            f = frames.start + number
            frame = t["frames"][part("frame_byte_end", f)].tobytes()
            assert zlib.crc32(frame, zlib.crc32(f"{meta['part']}/{sample}/{number}".encode())) == t["frame_checksum"][f]
            packed = zstandard.decompress(frame[: t["frame_packed_bytes"][f]])
            plane, raw = np.frombuffer(packed, "u1").reshape(-1, width), frame[t["frame_packed_bytes"][f] :]
            if meta["encoding"] == "fp8" and layer < len(layers) - 1:
                e4m3 = torch.tensor(plane).view(torch.float8_e4m3fn).float().numpy()
                numbers = e4m3 * np.frombuffer(raw, "<f4")[:, None]
            else:
                exponent, rest = (plane[1:] + plane[0]).astype("u4"), np.frombuffer(raw, "u1").reshape(-1, width)
                bits = (rest & 0x80).astype("u4") << 24 | exponent << 23 | (rest & 0x7F).astype("u4") << 16
                numbers = bits.view("f4")
            states[layer][at : at + 256] = numbers
        assert number + 1 == frames.stop - frames.start
        samples[sample] = {"token_ids": tokens, "last_rows": rows, "states": states}
    return samples


@pytest.mark.parametrize("encoding", ["lossless", "fp8"])
def test_reader_from_the_page_agrees(make: Make, tmp_path: Path, encoding: str) -> None:
    make(tmp_path / "work", encoding=encoding)
    paths = [tmp_path / "work" / f"shard-{number}.safetensors" for number in (0, 1)]
    reader = HiddenStateReader(paths)
    found = read_shard(paths[0]) | read_shard(paths[1])
    assert list(found) == reader.ids
    assert len(found) == 22
    for sample in reader.ids:
        ours, theirs = reader.read(sample), found[sample]
        np.testing.assert_array_equal(ours.token_ids, theirs["token_ids"])
        np.testing.assert_array_equal(ours.last_rows, theirs["last_rows"][:-1])
        for layer in range(3):
            np.testing.assert_array_equal(ours.aux[:, layer].float(), theirs["states"][layer])
        np.testing.assert_array_equal(ours.last.float(), theirs["states"][3][:-1])


def test_any_safetensors_reader_opens_a_shard(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work")
    path = tmp_path / "work" / "shard-1.safetensors"
    tensors = load_file(path)
    assert tensors["frames"].nbytes == tensors["frame_byte_end"][-1]
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["format"] == "eagle3-hidden-states-1"
        assert file.metadata()["hidden_size"] == str(H)
        assert int(file.metadata()["frame_rows"]) == codec.FRAME_ROWS


def test_a_shard_may_be_empty(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work", shards=40)
    paths = [tmp_path / "work" / f"shard-{number}.safetensors" for number in range(40)]
    empty = [path for path in paths if not read_shard(path)]
    assert empty
    assert load_file(empty[0])["frames"].shape == (0,)
    assert len(HiddenStateReader(paths)) == 22
