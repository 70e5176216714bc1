"""The GPU kernels agree with their reference implementations: run here by Triton's interpreter, at odd sizes."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3 import draft
from eagle3.draft import ops
from eagle3.draft.ops import adamw, float8, losses, norm, own_keys, rope, swiglu
from eagle3.draft.ops import rows as sums

pytest.importorskip("triton")
INTERPRETER = "TRITON_INTERPRET"
interpreted = pytest.mark.skipif(INTERPRETER not in os.environ, reason="run by the first test")


@pytest.mark.skipif(INTERPRETER in os.environ, reason="this is that process")
def test_in_a_process_of_the_interpreter() -> None:
    """Triton looks at the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, INTERPRETER: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def bindings() -> set[tuple[str, str]]:
    """The kernels that operations import where a tensor is on a GPU: module and name."""
    found = set()
    for path in Path(draft.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_kernel"):
                found |= {(node.module or "", alias.name) for alias in node.names}
    return found


@interpreted
def test_every_operation_finds_its_kernel() -> None:
    written = set()
    for path in Path(ops.__path__[0]).glob("*_kernel.py"):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        written |= {(f"{ops.__name__}.{path.stem}", name) for name in functions if not name.startswith("_")}
    assert bindings() == written


@pytest.fixture
def kernels() -> Any:
    """All of them, by name."""
    return SimpleNamespace(**{name: getattr(importlib.import_module(module), name) for module, name in bindings()})


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    ("heads", "groups", "d", "dv", "steps"), [(6, 2, 12, 12, 3), (4, 4, 24, 16, 1), (3, 1, 8, 8, 0)]
)
def test_own_columns(kernels: Any, heads: int, groups: int, d: int, dv: int, steps: int) -> None:
    n, scale = 5, 0.3
    # Parts of larger tensors, as in the unroll: queries next to keys, heads of the log-sum-exp apart.
    q = randn(n, heads + groups, d)[:, :heads]
    slots = torch.randperm(n + 3, generator=torch.Generator().manual_seed(0))[:n]
    out, lse = randn(n + 3, heads, dv + 4)[..., :dv], randn(heads, n + 3).mT
    starts = 5 + torch.cat([torch.tensor([0]), (n + 2 - torch.arange(3)).cumsum(0)])
    own = [randn(30, groups + 1, size)[:, 1:] for size in (d, dv)]
    keys = own_keys.KeyValues(q, q, *own, starts)
    joint, found = torch.empty(2, n, heads, dv).unbind()
    total = own_keys.merge_own_keys(q, out, lse, slots, keys, steps, scale, joint)
    close((kernels.merge_own_keys(q, out, lse, slots, keys, steps, scale, found), found), (total, joint))

    def gradients(backward: Any) -> tuple[Tensor, ...]:
        d_q, before = randn(n, heads + groups, d), [-randn(30, groups + 1, size) for size in (d, dv)]
        # Arbitrary values where there is no gradient yet.
        for gradient in before:
            gradient[[start - starts[0] + n - 1 for start in starts[:steps].tolist()], 1:] = torch.nan
        changed = own_keys.KeyValues(q, q, *(x[:, 1:] for x in before), starts)
        slot_d_q, d_out = randn(n + 3, heads, d), randn(n, heads, dv)
        backward(d_q[:, :heads], slot_d_q, d_out, q, joint, total, slots, keys, changed, steps, scale, n - 1)
        return d_q, *before

    close(gradients(kernels.merge_own_keys_backward), gradients(own_keys.merge_own_keys_backward))

    def scattered(kernel: Any, parts: int) -> tuple[Tensor, ...]:
        buffers = randn(n + 3, heads, d), *randn(2, n + 3, heads, dv), randn(heads, n + 3).mT
        kernel(slots, (q, randn(n, heads, dv), joint, total)[:parts], buffers[:parts])
        return buffers

    for parts in (1, 4):
        close(scattered(kernels.scatter_to_slots, parts), scattered(own_keys.scatter_to_slots, parts))


@interpreted
def test_cross_entropy(kernels: Any) -> None:
    # Teachers with 3, 0, 2 and 7 students; the third one carries no loss.
    counts, size = torch.tensor([3, 0, 2, 7]), 600
    offsets = 5 + torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    target, mass = 2 * randn(4, size), torch.tensor([1.0, 1.0, 0.0, 0.5])
    lse = target.logsumexp(-1)
    loss_target = losses.LossTarget(torch.tensor([7, 0, -1, 599]), lse, lse - mass.log(), mass, randn(4))
    teachers = torch.repeat_interleave(torch.arange(4), counts)
    for loss in ("kl", "ce"):
        logits, factors = 3 * randn(12, size), randn(12).abs()
        # Of equal logits the first counts, whether or not the kernel holds them in the same column of its blocks (256).
        logits[4, [70, 400]], logits[10, [90, 346]] = 20.0, 20.0
        expected = losses.value_and_gradient(logits, target, teachers, factors, loss_target, loss, 1.0, 1.0)
        found = kernels.cross_entropy(logits, target, offsets, 7, factors, loss_target, loss == "ce")
        close((*found, logits), expected)


@interpreted
def test_element_wise_work(kernels: Any) -> None:
    gate_up, d_out = randn(3, 140), randn(3, 70)
    close([kernels.swiglu(gate_up)], [swiglu.swiglu(gate_up)])
    found, expected = [d_out.clone(), gate_up.clone()], [d_out.clone(), gate_up.clone()]
    kernels.swiglu_backward(*found)
    swiglu.swiglu_backward(*expected)
    close(found, expected)
    x, weight, d_x = randn(9, 50)[:, :40], randn(40), randn(9, 40)
    for plus in (None, randn(9, 40)):
        total, expected_total = randn(41)[1:], randn(41)[1:]
        # In place, too: rows of the gradient may be apart.
        whole = randn(9, 45)
        buffer, expected = (
            whole[:, 2:42],
            norm._norm_backward(d_x, x, weight, 1e-5, plus, expected_total, randn(9, 40)),
        )
        buffer.copy_(d_x)
        close([kernels.norm_backward(buffer, x, weight, 1e-5, plus, total, buffer), total], [expected, expected_total])
    rows, more = torch.randperm(9)[:5], randn(5, 50)[:, 5:]
    found_rows, expected_rows = randn(9, 60)[:, :45], randn(9, 60)[:, :45]
    kernels.add_rows(found_rows, rows, more)
    sums.add_rows(expected_rows, rows, more)
    close([found_rows], [expected_rows])
    cos, sin, positions = randn(50, 6), randn(51, 6)[:50], torch.randint(50, (7,))
    for interleaved, direction in itertools.product((False, True), (1.0, -1.0)):
        found, expected = randn(7, 2, 3, 12), randn(7, 2, 3, 12)
        kernels.rotate(found[:, 0], positions, cos, sin, direction, interleaved)
        rope._rotate(expected[:, 0], positions, cos, sin, direction, interleaved)
        close([found], [expected])
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
    close([kernels.sum_rows(randn(20, 30), rows, offsets)], [sums.sum_rows(randn(20, 30), rows, offsets)])


@interpreted
def test_more_columns_than_a_block_and_more_rows_than_programs(kernels: Any) -> None:
    gate_up, d_out = randn(2, 4300), randn(2, 2150)
    close([kernels.swiglu(gate_up)], [swiglu.swiglu(gate_up)])
    found, expected = [d_out.clone(), gate_up.clone()], [d_out.clone(), gate_up.clone()]
    kernels.swiglu_backward(*found)
    swiglu.swiglu_backward(*expected)
    close(found, expected)
    rows, more = torch.tensor([3, 0]), randn(2, 2150)
    found, expected = [randn(4, 2150)], [randn(4, 2150)]
    kernels.add_rows(*found, rows, more)
    sums.add_rows(*expected, rows, more)
    close(found, expected)
    offsets = torch.tensor([0, 1, 2])
    close([kernels.sum_rows(more, rows % 2, offsets)], [sums.sum_rows(more, rows % 2, offsets)])
    slots, parts = torch.tensor([2, 0]), (randn(2, 3, 700), randn(2, 3, 500), randn(2, 3, 500), randn(2, 3))
    found, expected = ([randn(4, 3, 700), randn(4, 3, 500), randn(4, 3, 500), randn(3, 4).mT] for _ in range(2))
    kernels.scatter_to_slots(slots, parts, found)
    own_keys.scatter_to_slots(slots, parts, tuple(expected))
    close(found, expected)
    x, d_x, weight = randn(530, 6), randn(530, 6), randn(6)
    totals = randn(6), randn(6)
    found, expected = (
        [backward(d_x, x, weight, 1e-5, None, total, torch.empty(530, 6)), total]
        for backward, total in zip((kernels.norm_backward, norm._norm_backward), totals, strict=True)
    )
    close(found, expected)


@interpreted
@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_adamw(kernels: Any, skipped: float) -> None:
    scalars = torch.tensor(3.0), torch.tensor(skipped), torch.tensor([0.1, 0.05])

    def after(step: Any) -> tuple[Tensor, ...]:
        # Begins anywhere and ends inside a block.
        values, first, second, gradient = randn(4, 2503)[:, 3:]
        # Where gradients are tiny, epsilon in the divisor matters.
        first[:9], second[:9], gradient[:9] = 0, 0, 1e-8
        if skipped:
            gradient[::2] = torch.nan
        step(values, first, second.abs_(), gradient, *scalars, 1e-2, 0.1)
        return values, first, second, gradient

    close(after(kernels.adamw), after(adamw.adamw))
