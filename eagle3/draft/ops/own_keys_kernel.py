# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"
"""Own keys on a GPU, with the scatter and gather around the causal kernel."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton import next_power_of_2 as padded

from eagle3.draft.ops.own_keys import KeyValues


def scatter_to_slots(slots: Tensor, tensors: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> None:
    """See `own_keys.scatter_to_slots`. Rows of q need not be adjacent; each head's wide log-sum-exp is contiguous."""
    (q, *others), (wide_q, *wide_others) = tensors, wide
    n, heads, d = q.shape
    width = heads * others[0].shape[2] if others else 0
    _scatter_to_slots[(n,)](
        slots, q, wide_q, *(others or (None,) * 3), *(wide_others or (None,) * 3),
        q.stride(0), heads * d, width, heads, len(wide_q),
        OTHERS=bool(others), HEADS=padded(heads), BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scatter_to_slots(
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


def merge_own_keys(
    q: Tensor, wide_out: Tensor, wide_lse: Tensor, slots: Tensor, keys: KeyValues, steps: int, scale: float, out: Tensor
) -> Tensor:
    """See `own_keys.merge_own_keys`. Rows of q and own keys need not be adjacent; wide tensors may be strided."""
    n, heads, groups = *q.shape[:2], keys.own_k.shape[1]
    total = wide_lse.new_empty(n, heads)
    _merge_own_keys[n, groups](
        q, wide_out, wide_lse, slots, keys.own_k, keys.own_v, keys.starts, out, total, scale, steps,
        *wide_out.stride()[:2], *wide_lse.stride(), *_shape(q, keys), num_warps=1,
    )  # fmt: skip
    return total


def merge_own_keys_backward(
    d_q: Tensor,
    wide_d_q: Tensor,
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    slots: Tensor,
    keys: KeyValues,
    gradients: KeyValues,
    steps: int,
    scale: float,
    seen: int,
) -> None:
    """See `own_keys.merge_own_keys_backward`. Gradients have the strides of what they belong to."""
    _merge_own_keys_backward[len(q), keys.own_k.shape[1]](
        d_q, wide_d_q.contiguous(), d_out, q, out, lse, slots, keys.own_k, keys.own_v, keys.starts,
        gradients.own_k, gradients.own_v, scale, steps, seen, *_shape(q, keys), num_warps=1,
    )  # fmt: skip


def _shape(q: Tensor, keys: KeyValues) -> tuple[int, ...]:
    """Strides of rows, key-value heads, queries' heads of each, head sizes; and the padded sizes."""
    (_, groups, d), dv = keys.own_k.shape, keys.own_v.shape[2]
    heads = q.shape[1] // groups
    strides = q.stride(0), keys.own_k.stride(0), keys.own_v.stride(0)
    return *strides, groups, heads, d, dv, padded(heads), padded(d), padded(dv)


@triton.jit
def _merge_own_keys(
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
    # Extend the finished softmax, online.
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
def _merge_own_keys_backward(
    d_q, wide_d_q, d_out, q, out, lse, slots, keys, values, starts, d_keys, d_values, scale, steps, seen,
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
    # Columns of a gradient that exist already: all or none.
    there, value_there = tl.where(row < seen, d, 0), tl.where(row < seen, dv, 0)
    first = tl.load(starts)
    for step in range(steps):
        own = tl.load(starts + step) - first + row
        key_at, value_at = own * k_row + group * d + column, own * v_row + group * dv + value_column
        key = tl.load(keys + key_at, column < d, 0.0).to(tl.float32)
        value = tl.load(values + value_at, value_column < dv, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key[None, :], 1) * scale - total)
        d_score = weight * (tl.sum(d_result * value[None, :], 1) - delta) * scale
        d_query += d_score[:, None] * key[None, :]
        d_key = tl.load(d_keys + key_at, column < there, 0.0).to(tl.float32)
        d_key += tl.sum(d_score[:, None] * query, 0)
        d_value = tl.load(d_values + value_at, value_column < value_there, 0.0).to(tl.float32)
        tl.store(d_keys + key_at, d_key, column < d)
        tl.store(d_values + value_at, d_value + tl.sum(weight[:, None] * d_result, 0), value_column < dv)
    tl.store(d_q + at, d_query, inside)
