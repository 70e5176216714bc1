"""Matrix products in float8, which GPUs from Hopper and Ada on compute twice as fast as those in bfloat16.

Both factors are rounded to e4m3 (range 448, three bits of mantissa) with one scale per row, computed each time: a row
of activations or gradients is one token, so a large one costs its own precision alone. That is why gradients need no
e5m2, whose range is wider and mantissa shorter. Scales are powers of two: they round nothing, so a weight rounded along
its rows for the forward pass and along its columns for the input's gradient is the same weight, except values that
are tiny in one of them.

Gradients of weights stay in bfloat16 (as in torchao's recipe `rowwise_with_gw_hp`). Their products sum over tokens:
both factors would be rounded and transposed once more, their number padded, and the product, which cannot be summed in
float32, written out before it is added. That takes most of the time it saves, where precision matters most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from eagle3.errors import Eagle3Error

# The kernels support no other lengths; the number of tokens is free.
MULTIPLE = 16


class Scaled(NamedTuple):
    """A matrix in float8: row i is scales[i] * values[i]."""

    values: Tensor
    """[n, K] float8_e4m3fn"""
    scales: Tensor
    """[n, 1] float32"""


class Float8(NamedTuple):
    """A weight as its two products read it."""

    rows: Scaled
    """[out, in]"""
    columns: Scaled
    """[in, out]"""

    @classmethod
    def of(cls, value: Tensor) -> Float8 | None:
        """Round a weight [out, in]; None if float8 does not support its shape."""
        if any(size % MULTIPLE for size in value.shape):
            return None
        return cls(Scaled(*quantise(value)), Scaled(*quantise(value.mT.contiguous())))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round [n, K] to float8, each row with its own power of two: the smallest that brings its values below 448.

    Returns:
        values and scales, as in `Scaled`. A row with an infinity or NaN gets an infinite scale, so that every product
        with it is not finite either.
    """
    if x.is_cuda:
        from eagle3.draft.ops.float8_kernel import quantise as kernel

        return kernel(x)
    wide = x.float()
    # Exponent bits alone; 448 is 7/8 of 512.
    power = ((wide.abs().amax(1, keepdim=True) * (8 / 7)).view(torch.int32) & 0x7F800000).view(torch.float32)
    scales = (power / 256).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def product(x: Tensor, matrix: Scaled) -> Tensor:
    """[n, K] times the transpose of [m, K] -> [n, m] in x's dtype, added up in float32."""
    values, scales = quantise(x)
    # Without fast accumulation, which adds up in fewer bits.
    return functional.scaled_mm(
        values,
        matrix.values.mT,
        scales,
        ScalingType.RowWise,
        matrix.scales.mT,
        ScalingType.RowWise,
        output_dtype=x.dtype,
        use_fast_accum=False,
    )


def require_float8(device: torch.device) -> None:
    """Raise Eagle3Error if the device does not support float8."""
    found = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        found = f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
    raise Eagle3Error(
        "this device does not support float8",
        where="draft.float8",
        found=found,
        expected="a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell)",
        remedy="set draft.float8 to false, or train on such a GPU",
    )
