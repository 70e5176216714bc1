# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""SwiGLU on a GPU."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """See `swiglu.swiglu`."""
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
    """See `swiglu.swiglu_backward`."""
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
