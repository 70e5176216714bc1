# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Triton kernels of the element-wise work, for GPUs. Every one has a plain twin that says what it computes.

All compute in float32 and read every operand once or twice: their time is that of the memory traffic. Lengths are
arguments, not compile-time constants, so rows do not recompile.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded

from eagle3.draft.attention import Keys


def spread(slots: Tensor, tensors: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> None:
    """`attention._spread`; rows of q may be apart. Every head's wide log-sum-exp lies together, in one piece."""
    (q, *others), (wide_q, *wide_others) = tensors, wide
    n, heads, d = q.shape
    width = heads * others[0].shape[2] if others else 0
    _spread[(n,)](
        slots, q, wide_q, *(others or (None,) * 3), *(wide_others or (None,) * 3),
        q.stride(0), heads * d, width, heads, len(wide_q),
        OTHERS=bool(others), HEADS=padded(heads), BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _spread(
    slots, q, wide_q, d_out, out, lse, wide_d, wide_out, wide_lse, q_row, q_width, width, heads, queries,
    OTHERS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    column, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    for block in range(0, q_width, BLOCK):
        inside = column < q_width - block
        tl.store(wide_q + slot * q_width + block + column, tl.load(q + row * q_row + block + column, inside), inside)
    if OTHERS:
        for block in range(0, width, BLOCK):
            inside = column < width - block
            source, goal = row * width + block + column, slot * width + block + column
            tl.store(wide_d + goal, tl.load(d_out + source, inside), inside)
            tl.store(wide_out + goal, tl.load(out + source, inside), inside)
        mass = tl.load(lse + row * heads + head, head < heads)
        tl.store(wide_lse + head.to(tl.int64) * queries + slot, mass, head < heads)


def fold(
    q: Tensor, out: Tensor, lse: Tensor, slots: Tensor, keys: Keys, steps: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`attention._fold`; rows of q and of own keys and values may be apart, and out and lse lie in any way."""
    n, heads, groups, dv = *q.shape[:2], keys.own_k.shape[1], out.shape[2]
    joint, total = out.new_empty(n, heads, dv), lse.new_empty(n, heads)
    _fold[n, groups](
        q, out, lse, slots, keys.own_k, keys.own_v, keys.starts, joint, total, scale, steps,
        *out.stride()[:2], *lse.stride(), *_shape(q, keys), num_warps=1,
    )  # fmt: skip
    return joint, total


def fold_backward(
    d_q: Tensor,
    wide_d_q: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    slots: Tensor,
    keys: Keys,
    gradients: Keys,
    steps: int,
    scale: float,
) -> None:
    """`attention._fold_backward`; gradients lie in memory as what they belong to."""
    _fold_backward[len(q), keys.own_k.shape[1]](
        d_q, wide_d_q.contiguous(), d_out, q, out, lse, slots, keys.own_k, keys.own_v, keys.starts,
        gradients.own_k, gradients.own_v, scale, steps, *_shape(q, keys), num_warps=1,
    )  # fmt: skip


def _shape(q: Tensor, keys: Keys) -> tuple[int, ...]:
    """Strides of rows, key-value heads, queries' heads of each, head sizes; and the padded sizes."""
    (_, groups, d), dv = keys.own_k.shape, keys.own_v.shape[2]
    heads = q.shape[1] // groups
    strides = q.stride(0), keys.own_k.stride(0), keys.own_v.stride(0)
    return *strides, groups, heads, d, dv, padded(heads), padded(d), padded(dv)


@triton.jit
def _fold(
    q, out, lse, slots, keys, values, starts, joint, total, scale, steps,
    out_row, out_head, lse_row, lse_head, q_row, k_row, v_row,
    groups: tl.constexpr, heads: tl.constexpr, d: tl.constexpr, dv: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column, value_column = tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, DV)
    present, head = member < heads, group * heads + member
    at = row * q_row + head[:, None] * d + column
    inside = present[:, None] & (column < d)
    out_inside = present[:, None] & (value_column < dv)
    query = tl.load(q + at, inside, 0.0).to(tl.float32)
    slot = tl.load(slots + row)
    out_at = slot * out_row + head[:, None] * out_head + value_column
    result = tl.load(out + out_at, out_inside, 0.0).to(tl.float32)
    # One more softmax over what is there already, online.
    largest = tl.load(lse + slot * lse_row + head.to(tl.int64) * lse_head, present, 0.0)
    mass = tl.full([HEADS], 1.0, tl.float32)
    first = tl.load(starts)
    for step in range(steps):
        own = tl.load(starts + step) - first + row
        key = tl.load(keys + own * k_row + group * d + column, column < d, 0.0).to(tl.float32)
        value_at = own * v_row + group * dv + value_column
        value = tl.load(values + value_at, value_column < dv, 0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], 1) * scale
        top = tl.maximum(largest, score)
        shrink, weight = tl.exp(largest - top), tl.exp(score - top)
        mass = mass * shrink + weight
        result = result * shrink[:, None] + weight[:, None] * value[None, :]
        largest = top
    place = row * groups * heads + head
    tl.store(joint + place[:, None] * dv + value_column, result / mass[:, None], out_inside)
    tl.store(total + place, largest + tl.log(mass), present)


@triton.jit
def _fold_backward(
    d_q, wide_d_q, d_out, q, out, lse, slots, keys, values, starts, d_keys, d_values, scale, steps,
    q_row, k_row, v_row,
    groups: tl.constexpr, heads: tl.constexpr, d: tl.constexpr, dv: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column, value_column = tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, DV)
    present, head = member < heads, group * heads + member
    at = row * q_row + head[:, None] * d + column
    place = row * groups * heads + head
    out_at = place[:, None] * dv + value_column
    inside = present[:, None] & (column < d)
    out_inside = present[:, None] & (value_column < dv)
    query = tl.load(q + at, inside, 0.0).to(tl.float32)
    wide_at = (tl.load(slots + row) * groups * heads + head)[:, None] * d + column
    d_query = tl.load(wide_d_q + wide_at, inside, 0.0).to(tl.float32)
    d_result = tl.load(d_out + out_at, out_inside, 0.0).to(tl.float32)
    delta = tl.sum(d_result * tl.load(out + out_at, out_inside, 0.0).to(tl.float32), 1)
    # Heads that only pad get weight 0.
    total = tl.load(lse + place, present, float("inf"))
    first = tl.load(starts)
    for step in range(steps):
        own = tl.load(starts + step) - first + row
        key_at, value_at = own * k_row + group * d + column, own * v_row + group * dv + value_column
        key = tl.load(keys + key_at, column < d, 0.0).to(tl.float32)
        value = tl.load(values + value_at, value_column < dv, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key[None, :], 1) * scale - total)
        d_score = weight * (tl.sum(d_result * value[None, :], 1) - delta) * scale
        d_query += d_score[:, None] * key[None, :]
        d_key = tl.load(d_keys + key_at, column < d, 0.0).to(tl.float32) + tl.sum(d_score[:, None] * query, 0)
        d_value = tl.load(d_values + value_at, value_column < dv, 0.0).to(tl.float32)
        tl.store(d_keys + key_at, d_key, column < d)
        tl.store(d_values + value_at, d_value + tl.sum(weight[:, None] * d_result, 0), value_column < dv)
    tl.store(d_q + at, d_query, inside)


def cross_entropy(
    logits: Tensor, offsets: Tensor, students: int, weights: Tensor, target: Tensor, mass: Tensor, negentropy: Tensor
) -> tuple[Tensor, Tensor]:
    """`objective._taught` of kl and ce; writes the gradient over the logits.

    Args:
        logits: [m, Vd].
        offsets: [B+1] int64; teacher b's rows are offsets[b] - offsets[0] .. offsets[b+1] - offsets[0] - 1.
        students: the most rows that a teacher has.
        weights: [m].
        target: [B, Vd] float32.
        mass: [B] its sum.
        negentropy: [B] sum of target log target.

    Returns:
        loss and choice [m].
    """
    value, choice = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.int64)
    _cross_entropy[(len(target),)](
        logits, offsets, weights, target, mass, negentropy, value, choice, target.shape[1],
        STUDENTS=padded(students), BLOCK=256, num_warps=8,
    )  # fmt: skip
    return value, choice


@triton.jit
def _cross_entropy(
    logits, offsets, weights, target, mass, negentropy, value, choice, size,
    STUDENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All students of a teacher together: its distribution is read once for all of them.
    teacher = tl.program_id(0).to(tl.int64)
    student, column = tl.arange(0, STUDENTS), tl.arange(0, BLOCK)
    first, start = tl.load(offsets), tl.load(offsets + teacher)
    row = start - first + student
    present = row < tl.load(offsets + teacher + 1) - first
    at, target_at = row[:, None] * size + column, teacher * size + column
    largest = tl.full([STUDENTS], float("-inf"), tl.float32)
    best, total, product = tl.zeros([STUDENTS], tl.int32), tl.zeros_like(largest), tl.zeros_like(largest)
    for block in range(0, size, BLOCK):
        inside = column < size - block
        mask = present[:, None] & inside
        # Zero for rows that only pad, so that no number there is undefined.
        z = tl.load(logits + at + block, mask, 0.0).to(tl.float32)
        wanted = tl.load(target + target_at + block, inside, 0.0)
        product += tl.sum(z * wanted[None, :], 1)
        z = tl.where(inside[None, :], z, float("-inf"))
        top, place = tl.max(z, 1, return_indices=True)
        best = tl.where(top > largest, place + block, best)
        top = tl.maximum(top, largest)
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(z - top[:, None]), 1)
        largest = top
    lse = largest + tl.log(total)
    whole, weight = tl.load(mass + teacher), tl.load(weights + row, present, 0.0)
    tl.store(value + row, tl.load(negentropy + teacher) - product + whole * lse, present)
    tl.store(choice + row, best, present)
    for block in range(0, size, BLOCK):
        inside = column < size - block
        mask = present[:, None] & inside
        z = tl.load(logits + at + block, mask, 0.0).to(tl.float32)
        wanted = tl.load(target + target_at + block, inside, 0.0)
        gradient = (tl.exp(z - lse[:, None]) * whole - wanted[None, :]) * weight[:, None]
        tl.store(logits + at + block, gradient, mask)


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


def swiglu_backward(d_out: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`weights.swiglu_backward`."""
    n, width = d_out.shape
    out, d_gate_up = torch.empty_like(d_out), torch.empty_like(gate_up)
    _swiglu_backward[n, triton.cdiv(width, 1024)](d_out, gate_up, out, d_gate_up, width, BLOCK=1024, num_warps=4)
    return out, d_gate_up


@triton.jit
def _swiglu_backward(d_out, gate_up, out, d_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * 2 * width + column, column < width
    gate = tl.load(gate_up + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, inside, 0.0).to(tl.float32)
    d = tl.load(d_out + row * width + column, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(out + row * width + column, gate * sigmoid * up, inside)
    tl.store(d_gate_up + at, d * up * sigmoid * (1 + gate * (1 - sigmoid)), inside)
    tl.store(d_gate_up + at + width, d * gate * sigmoid, inside)


def norm_backward(d_out: Tensor, x: Tensor, weight: Tensor, eps: float, plus: Tensor | None, total: Tensor) -> Tensor:
    """`weights._norm_backward`; rows of x may be apart."""
    n, size = x.shape
    d_x, block, parts = x.new_empty(n, size), padded(size), min(n, 1024)
    d_weight = torch.empty(parts, size, dtype=torch.float32, device=x.device)
    _norm_backward[(parts,)](
        d_out.contiguous(), x, weight, plus, d_x, d_weight, total, n, size, x.stride(0), eps,
        PLUS=plus is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    torch.sum(d_weight, 0, out=total)
    return d_x


@triton.jit
def _norm_backward(
    d_out, x, weight, plus, d_x, d_weight, total, n, size, stride, eps, PLUS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    # One part goes on from what is there already: the sum of the parts takes its place.
    before = tl.load(total + column, inside, 0.0)
    gradient = tl.where(tl.program_id(0) == 0, before, 0.0)
    for row in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0)):
        d = tl.load(d_out + row * size + column, inside, 0.0).to(tl.float32)
        wide = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        normed, d_normed = wide * inverse, d * factor
        gradient += d * normed
        result = (d_normed - normed * (tl.sum(d_normed * normed, 0) / size)) * inverse
        if PLUS:
            result += tl.load(plus + row * size + column, inside, 0.0).to(tl.float32)
        tl.store(d_x + row * size + column, result, inside)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * size + column, gradient, inside)


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
