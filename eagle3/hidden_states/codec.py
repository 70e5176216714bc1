"""Frames: up to 256 rows of one state, compressed, with a checksum that depends on the frame's place.

A bf16 number has 1 sign, 8 exponent and 7 mantissa bits. Sign and mantissa of hidden states are noise, but exponents
cluster around a different value in each channel. So a frame stores sign and mantissa unchanged, and the exponents as
their distance from the channel's mean, which a Huffman code compresses to about 2.6 bits.

Measured on SmolLM2-135M, layers 2, 15, 27 and 30: 0.665 of bf16 (entropy of the distances: 0.663; without the means:
0.674; zstd level 1 with its usual matches: 0.692, at a third of the speed).
"""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Bits = NDArray[np.uint16]
"""The bits of bf16 numbers."""
Bytes = NDArray[np.uint8]
Encoding = Literal["lossless", "fp8"]

FRAME_ROWS = 256

# Exponents have almost no repeated strings: with long matches only, zstd is a Huffman coder at 0.8 GB/s per core,
# 3% smaller and three times faster than plain level 1.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6
)
_E4M3_MAX = 448.0
# A row's largest magnitude counts as at least this, so that its scale is a normal number; smaller rows become 0.
_SMALLEST = 2.0**-110

# zstd contexts must not be shared between threads.
_local = threading.local()


class Frame(NamedTuple):
    """One encoded frame: its payload is `packed` (zstd) followed by `raw`."""

    packed: bytes
    raw: bytes
    checksum: int


def seed(part: str, sample: str, frame: int) -> int:
    """Return the start value of a frame's CRC, so that a frame in another's place fails its checksum."""
    return zlib.crc32(f"{part}/{sample}/{frame}".encode())


def encode(rows: Bits, encoding: Encoding, crc: int) -> Frame:
    """Encode up to 256 rows of one state.

    Args:
        rows: [t, H], finite.
        encoding: `lossless`, or `fp8` (e4m3 with one power-of-two scale per row).
        crc: the `seed` of this frame.
    """
    packed_plane, raw = _split(rows) if encoding == "lossless" else _quantise(rows)
    packed = _compressor().compress(packed_plane.data)
    return Frame(packed, raw, zlib.crc32(raw, zlib.crc32(packed, crc)))


def decode(payload: memoryview, packed_bytes: int, encoding: Encoding, out: Bits) -> None:
    """Decode a frame into `out` [t, H], whose rows need not be contiguous; the checksum is not checked.

    Raises:
        zstandard.ZstdError or ValueError: the payload is not a valid frame.
    """
    t, H = out.shape
    plane_rows = t + 1 if encoding == "lossless" else t
    plane = _decompressor().decompress(payload[:packed_bytes], max_output_size=plane_rows * H)
    packed = np.frombuffer(plane, np.uint8).reshape(plane_rows, H)
    raw = payload[packed_bytes:]
    if encoding == "lossless":
        _merge(packed, np.frombuffer(raw, np.int8).reshape(t, H), out)
    else:
        _restore(packed, np.frombuffer(raw, "<f4").reshape(t, 1), out)


def _split(rows: Bits) -> tuple[Bytes, bytes]:
    """Return the exponent plane [1 + t, H], the channels' means first, and the sign and mantissa plane [t, H]."""
    t, H = rows.shape
    exponents = ((rows >> 7) & 0xFF).astype(np.uint8)
    plane = np.empty((t + 1, H), np.uint8)
    plane[0] = (exponents.sum(axis=0, dtype=np.uint16) + t // 2) // t  # 256 * 255 fits
    np.subtract(exponents, plane[0], out=plane[1:])  # modulo 256
    return plane, ((rows & 0x7F) | ((rows >> 8) & 0x80)).astype(np.uint8).tobytes()


def _merge(plane: Bytes, sign_mantissa: NDArray[np.int8], out: Bits) -> None:
    numbers = (plane[1:] + plane[0]).astype(np.uint16)
    numbers <<= 7
    # Sign extension moves the top bit to bit 15.
    low = sign_mantissa.astype(np.int16).view(np.uint16)
    low &= 0x807F
    np.bitwise_or(numbers, low, out=out)


def _quantise(rows: Bits) -> tuple[Bytes, bytes]:
    """Return e4m3 codes [t, H] and float32 scales [t]; a scale is a power of two, so decoding rounds nothing."""
    import torch

    values = bf16(rows).float()
    largest = values.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _E4M3_MAX)))
    codes = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.numpy(), scale.numpy().astype("<f4").tobytes()


def _restore(codes: Bytes, scale: NDArray[np.float32], out: Bits) -> None:
    import torch

    values = bf16(_e4m3_as_bf16()[codes])
    values *= torch.from_numpy(scale.copy()).bfloat16()
    out[...] = bits(values)


def _e4m3_as_bf16() -> Bits:
    """Return the bf16 bits of the 256 e4m3 numbers, all of which are exact in bf16."""
    import torch

    if not hasattr(_local, "e4m3"):
        codes = torch.arange(256, dtype=torch.uint8)
        _local.e4m3 = bits(codes.view(torch.float8_e4m3fn).to(torch.bfloat16))
    table: Bits = _local.e4m3
    return table


def bits(values: torch.Tensor) -> Bits:
    """Return the bits of a bf16 tensor on the CPU, as a view."""
    import torch

    found: Bits = values.view(torch.int16).numpy().view(np.uint16)
    return found


def bf16(values: Bits) -> torch.Tensor:
    """Return bits as a bf16 tensor, as a view."""
    import torch

    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
