# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""SwiGLU, norms, rotation, float8 values, and rows."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded


def swiglu(gate_up: Tensor) -> Tensor:
    """`weights.swiglu`."""
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    _swiglu[n, triton.cdiv(width, 2048)](gate_up, out, width, BLOCK=2048, num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * 2 * width + column, column < width
    gate = tl.load(gate_up + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, inside)


def swiglu_backward(d_out: Tensor, gate_up: Tensor) -> None:
    """`weights.swiglu_backward`."""
    n, width = d_out.shape
    _swiglu_backward[n, triton.cdiv(width, 1024)](d_out, gate_up, width, BLOCK=1024, num_warps=4)


@triton.jit
def _swiglu_backward(d_out, gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * 2 * width + column, column < width
    gate = tl.load(gate_up + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, inside, 0.0).to(tl.float32)
    d = tl.load(d_out + row * width + column, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(d_out + row * width + column, gate * sigmoid * up, inside)
    tl.store(gate_up + at, d * up * sigmoid * (1 + gate * (1 - sigmoid)), inside)
    tl.store(gate_up + at + width, d * gate * sigmoid, inside)


def norm_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, eps: float, plus: Tensor | None, total: Tensor, out: Tensor
) -> Tensor:
    """`weights._norm_backward`; rows of x and of out may be apart."""
    n, size = x.shape
    block, parts = padded(size), min(n, 264)
    d_weight = torch.empty(parts, size, dtype=torch.float32, device=x.device)
    _norm_backward[(parts,)](
        d_out, x, weight, plus, out, d_weight, total, n, size, d_out.stride(0), x.stride(0), out.stride(0), eps,
        PLUS=plus is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    torch.sum(d_weight, 0, out=total)
    return out


@triton.jit
def _norm_backward(
    d_out, x, weight, plus, d_x, d_weight, total, n, size, d_stride, stride, out_stride, eps,
    PLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    # One part goes on from what is there already: the sum of the parts takes its place.
    before = tl.load(total + column, inside, 0.0)
    gradient = tl.where(tl.program_id(0) == 0, before, 0.0)
    # Rows to come are fetched while one is computed.
    for row in tl.range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0), num_stages=3):
        d = tl.load(d_out + row * d_stride + column, inside, 0.0).to(tl.float32)
        wide = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        normed, d_normed = wide * inverse, d * factor
        gradient += d * normed
        result = (d_normed - normed * (tl.sum(d_normed * normed, 0) / size)) * inverse
        if PLUS:
            result += tl.load(plus + row * size + column, inside, 0.0).to(tl.float32)
        tl.store(d_x + row * out_stride + column, result, inside)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * size + column, gradient, inside)


def add_rows(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """`weights.add_rows`; rows of both may be apart."""
    n, size = x.shape
    blocks = triton.cdiv(size, 2048)
    _add_rows[n, blocks](total, rows, x, size, total.stride(0), x.stride(0), BLOCK=2048, num_warps=4)


@triton.jit
def _add_rows(total, rows, x, size, total_stride, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    goal = total + tl.load(rows + row) * total_stride + column
    more = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    tl.store(goal, tl.load(goal, inside, 0.0).to(tl.float32) + more, inside)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`float8.quantise`; rows of x may be apart."""
    n, size = x.shape
    values = torch.empty(n, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(n, 1, dtype=torch.float32, device=x.device)
    block = padded(size)
    _quantise[(n,)](x, values, scales, size, x.stride(0), BLOCK=block, num_warps=min(max(block // 1024, 1), 32))
    return values, scales


@triton.jit
def _quantise(x, values, scales, size, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * stride + column, column < size, 0.0).to(tl.float32)
    # Compared as integers, since the maximum of floats passes over NaN.
    largest = tl.max(tl.abs(wide).to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    power = ((largest * (8 / 7)).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.maximum(power / 256, 2.0**-126)
    tl.store(values + row * size + column, (wide * (1 / scale)).to(values.dtype.element_ty), column < size)
    tl.store(scales + row, scale)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, direction: float, interleaved: bool) -> Tensor:
    """`rope._rotate`; rows and heads of x may be apart."""
    n, heads, d = x.shape
    _rotate[(n,)](
        x, positions, cos, sin, direction, heads, x.stride(0), x.stride(1),
        HALF=d // 2, INTERLEAVED=interleaved, HEADS=padded(heads), BLOCK=padded(d // 2), num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def _rotate(
    x, positions, cosines, sines, direction, heads, row_stride, head_stride,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (pair < HALF)
    angle = tl.load(positions + row) * HALF + pair
    cos, sin = tl.load(cosines + angle, pair < HALF, 0.0), direction * tl.load(sines + angle, pair < HALF, 0.0)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = first_at + (1 if INTERLEAVED else HALF)
    at = x + row * row_stride + head * head_stride
    first = tl.load(at + first_at, inside, 0.0).to(tl.float32)
    second = tl.load(at + second_at, inside, 0.0).to(tl.float32)
    tl.store(at + first_at, first * cos - second * sin, inside)
    tl.store(at + second_at, second * cos + first * sin, inside)


def sum_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum x[rows[offsets[i] : offsets[i+1]]] for every i."""
    size = x.shape[1]
    out = x.new_empty(len(offsets) - 1, size)
    _sum_rows[len(out), triton.cdiv(size, 1024)](x, rows, offsets, out, size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _sum_rows(x, rows, offsets, out, size, BLOCK: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(offsets + bag), tl.load(offsets + bag + 1)):
        total += tl.load(x + tl.load(rows + index) * size + column, column < size, 0.0).to(tl.float32)
    tl.store(out + bag * size + column, total, column < size)
