"""Frames: whatever goes in comes out, and nothing else passes."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eagle3.hidden_states import codec

shapes = st.tuples(st.integers(1, codec.FRAME_ROWS), st.integers(1, 40))


def roundtrip(rows: codec.Bits, encoding: codec.Encoding) -> codec.Bits:
    packed, raw, _ = codec.encode(rows, encoding, 0)
    out = np.full((*rows.shape, 3), 0xFFFF, np.uint16)[:, :, 1]  # rows that lie apart
    codec.decode(memoryview(packed + raw), len(packed), encoding, out)
    return out


@given(arrays.arrays(np.uint16, shapes))
def test_lossless_returns_any_bits(rows: codec.Bits) -> None:
    np.testing.assert_array_equal(roundtrip(rows, "lossless"), rows)


@given(arrays.arrays(np.float32, shapes, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_fp8_is_e4m3_of_the_scaled_row(values: np.ndarray) -> None:
    rows = torch.from_numpy(values).bfloat16()
    found = codec.bf16(roundtrip(codec.bits(rows), "fp8").copy()).double()
    for row, got in zip(rows.double(), found, strict=True):
        largest = max(float(row.abs().max()), 2.0**-110)
        scale = 2.0 ** np.ceil(np.log2(np.float32(largest) / np.float32(448)))
        assert largest / scale <= 448
        # e4m3 has 3 mantissa bits, and steps of 2^-9 below 2^-6.
        bound = torch.maximum(row.abs() / 16, torch.tensor(scale * 2.0**-10))
        assert bool(((got - row).abs() <= bound).all())


def test_fp8_keeps_zero_rows_and_every_e4m3_number() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].bfloat16()[None]
    rows = torch.cat([numbers, torch.zeros_like(numbers), numbers * 2.0**40])
    assert torch.equal(codec.bf16(roundtrip(codec.bits(rows), "fp8").copy()), rows)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_checksum_notices_every_changed_byte_and_every_other_place(at: int, flip: int) -> None:
    rows = np.arange(60, dtype=np.uint16).reshape(5, 12)
    packed, raw, checksum = codec.encode(rows, "lossless", codec.seed("part", "sample", 3))
    payload = bytearray(packed + raw)
    assert zlib.crc32(payload, codec.seed("part", "sample", 3)) == checksum
    for other in (("part", "sample", 4), ("part", "sample2", 3), ("other", "sample", 3)):
        assert zlib.crc32(payload, codec.seed(*other)) != checksum
    payload[at % len(payload)] ^= flip
    assert zlib.crc32(payload, codec.seed("part", "sample", 3)) != checksum


def test_exponents_that_cluster_by_channel_take_less_than_seven_tenths() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(torch.randn(512, generator=generator))
    rows = (torch.randn(256, 512, generator=generator) * scales).bfloat16()
    packed, raw, _ = codec.encode(codec.bits(rows), "lossless", 0)
    assert len(packed) + len(raw) < 0.68 * 2 * rows.numel()


@pytest.mark.parametrize("encoding", ["lossless", "fp8"])
def test_decoding_a_wrong_length_raises(encoding: codec.Encoding) -> None:
    packed, raw, _ = codec.encode(np.zeros((4, 8), np.uint16), encoding, 0)
    for payload in (packed + raw[:-1], packed[:-1] + raw, packed + raw + b"x"):
        with pytest.raises((ValueError, zstandard.ZstdError)):
            codec.decode(memoryview(payload), len(packed), encoding, np.empty((4, 8), np.uint16))
