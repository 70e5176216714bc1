"""The GPU kernels compute what their plain twins say: run here by Triton's interpreter, at odd sizes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.draft import attention, float8, objective, rope, unroll, weights

pytest.importorskip("triton")
INTERPRETER = "TRITON_INTERPRET"
interpreted = pytest.mark.skipif(INTERPRETER not in os.environ, reason="run by the first test")


@pytest.mark.skipif(INTERPRETER in os.environ, reason="this is that process")
def test_in_a_process_of_the_interpreter() -> None:
    """Triton looks at the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, INTERPRETER: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def kernels() -> Any:
    return importlib.import_module("eagle3.draft.kernels")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("heads", "groups", "d", "dv", "steps"), [(6, 2, 12, 12, 3), (4, 4, 24, 16, 1)])
def test_own_columns(kernels: Any, heads: int, groups: int, d: int, dv: int, steps: int) -> None:
    n, scale = 5, 0.3
    q, out, lse = randn(n, heads, d), randn(n, heads, dv), randn(n, heads)
    # Parts of larger tensors, as in the unroll.
    keys, values = (randn(steps + 1, n + 2, groups, size)[:steps, :n] for size in (d, dv))
    joint, total = attention._fold(q, out, lse, scale, keys, values)
    close(kernels.fold(q, out, lse, scale, keys, values), (joint, total))

    def gradients(backward: Any) -> tuple[Tensor, ...]:
        before = [-randn(steps + 1, n + 2, groups, size) for size in (d, dv)]
        parts = [x[:steps, :n] for x in before]
        dq = backward(randn(n + 1, heads, d)[:n], randn(n, heads, dv), q, joint, total, scale, keys, values, *parts)
        return dq, *before

    close(gradients(kernels.fold_backward), gradients(attention._fold_backward))


@interpreted
def test_cross_entropy(kernels: Any) -> None:
    # Teachers with 3, 0, 2 and 7 students; the second row of targets carries no loss.
    counts, size = torch.tensor([3, 0, 2, 7]), 600
    offsets = 5 + torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    target = (2 * randn(4, size)).softmax(-1) * torch.tensor([1.0, 1.0, 0.0, 0.5])[:, None]
    entropy = torch.special.xlogy(target, target).sum(-1)
    lesson = objective._Lesson(target, target.sum(-1), entropy, target[:, :0], counts)
    logits, factors = 3 * randn(12, size), randn(12).abs()
    teachers = torch.repeat_interleave(torch.arange(4), counts)
    value, choice, gradient = objective._taught(logits, teachers, factors, lesson, "kl", 1.0, 1.0)
    found = kernels.cross_entropy(logits, offsets, 7, factors, *lesson[:3])
    close((*found, logits), (value, choice, gradient))


@interpreted
def test_element_wise_work(kernels: Any) -> None:
    gate_up, d_out = randn(3, 140), randn(3, 70)
    close([kernels.swiglu(gate_up)], [weights.swiglu(gate_up)])
    close(kernels.swiglu_backward(d_out, gate_up), weights.swiglu_backward(d_out, gate_up))
    x, weight, d_x = randn(9, 50)[:, :40], randn(40), randn(9, 40)
    for plus in (None, randn(9, 40)):
        expected = weights._norm_backward(d_x, x, weight, 1e-5, plus)
        close(kernels.norm_backward(d_x, x, weight, 1e-5, plus), expected)
    cos, sin, positions = randn(50, 6), randn(51, 6)[:50], torch.randint(50, (7,))
    heads = randn(7, 2, 3, 12)[:, 0]
    for interleaved in (False, True):
        found = kernels.rotate(heads, positions, cos, sin, interleaved)
        close([found], [rope._rotate(heads, positions, cos, sin, interleaved)])
    # A row of zeros, one with a huge value, and values that are not finite. No value is to be rounded up to a power of
    # two: the interpreter loses the carry.
    spread = (randn(6, 200) * torch.exp2(5 * randn(6, 1)))[:, :144]
    spread *= torch.where(spread.frexp().mantissa.abs() > 15 / 16, 0.9, 1)
    spread[1], spread[2, 7], spread[3, 8], spread[4, 9] = 0, 1e30, torch.inf, -torch.nan
    (values, scales), expected = kernels.quantise(spread), float8.quantise(spread)
    finite = torch.tensor([0, 1, 2, 5])
    assert torch.equal(scales, expected[1])
    assert torch.equal(values.float()[finite], expected[0].float()[finite])
    rows, offsets = torch.randperm(20), torch.tensor([0, 3, 3, 10, 20])
    close([kernels.sum_rows(randn(20, 30), rows, offsets)], [unroll._sum_rows(randn(20, 30), rows, offsets)])
