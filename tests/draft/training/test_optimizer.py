"""The optimisers against torch's own, with clipping, skipped steps and several processes."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle3.config.draft import DraftSettings
from eagle3.draft import parallel
from eagle3.draft.training import optimizer
from eagle3.draft.training.muon import MOMENTUM, orthogonal
from eagle3.draft.training.optimizer import Optimizer
from eagle3.draft.training.schedule import learning_rate

RATE, DECAY = 0.01, 0.1
SHAPES = {"fc.weight": (24, 40), "down.weight": (40, 24), "lm_head.weight": (30, 24), "norm.weight": (24,)}


def parameters(generator: torch.Generator) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def trained(
    kind: Literal["muon", "adamw"], gradients: list[float], device: torch.device | None = None
) -> dict[str, nn.Parameter]:
    """Weights after steps whose gradients are noise times the factors."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(weight.detach().to(device)) for name, weight in parameters(generator).items()}
    found = Optimizer(
        weights.items(), DraftSettings(optimizer=kind, max_grad_norm=0.5, max_grad_growth=1e9, weight_decay=DECAY)
    )
    for factor in gradients:
        for weight in weights.values():
            assert weight.grad is not None
            weight.grad += factor * torch.randn(weight.shape, generator=generator).to(device)
        found.step(RATE)
    return weights


def expected(kind: str, gradients: list[float]) -> dict[str, nn.Parameter]:
    """The same by torch's plain optimisers and clipping."""
    generator = torch.Generator().manual_seed(0)
    weights = parameters(generator)
    by_muon = [w for name, w in weights.items() if kind == "muon" and w.dim() == 2 and name != "lm_head.weight"]
    others = [w for w in weights.values() if not any(w is other for other in by_muon)]
    groups = [{"params": [w], "weight_decay": DECAY if w.dim() == 2 else 0.0} for w in others]
    plain: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=RATE, betas=optimizer.BETAS)]
    if by_muon:
        muon = torch.optim.Muon(by_muon, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        plain.append(muon)
    for factor in gradients:
        for weight in weights.values():
            weight.grad = factor * torch.randn(weight.shape, generator=generator)
        norm: Any = nn.utils.clip_grad_norm_(weights.values(), 0.5)
        if norm.isfinite():
            for part in plain:
                part.step()
    return weights


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_large_gradients_are_clipped_and_non_finite_ones_skipped(kind: Literal["muon", "adamw"]) -> None:
    gradients = [float("inf"), 0.01, 100.0, float("nan"), 3.0, float("inf"), 0.1]
    reference = expected(kind, gradients)
    for name, ours in trained(kind, gradients).items():
        # torch orthogonalises in bfloat16; a step of Muon moves a weight by about 0.2 RATE.
        slack = 3e-2 * 0.2 * RATE * len(gradients) if kind == "muon" and "norm" not in name else 1e-6
        torch.testing.assert_close(ours, reference[name], atol=slack, rtol=1e-5)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_orthogonal_keeps_singular_vectors_and_brings_the_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ orthogonal(1e4 * matrix) @ v.mT
    torch.testing.assert_close(found, found.diagonal().diag(), atol=1e-6, rtol=0)
    large = values > 0.05 * values.max()
    assert found.diagonal()[large].min() > 0.6
    assert found.diagonal().max() < 1.3


def test_orthogonal_of_zero_is_zero() -> None:
    assert not orthogonal(torch.zeros(4, 6)).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_recorded_steps_are_those_of_the_cpu() -> None:
    gradients = [0.01, 100.0, float("nan"), 3.0, float("inf"), 0.1]
    reference = trained("muon", gradients)
    for name, found in trained("muon", gradients, torch.device("cuda")).items():
        slack = 3e-2 * 0.2 * RATE * len(gradients) if found.dim() == 2 else 1e-6
        torch.testing.assert_close(found.cpu(), reference[name], atol=slack, rtol=1e-5)


def test_a_gradient_norm_far_above_its_running_mean_is_skipped() -> None:
    weight = nn.Parameter(torch.zeros(6, 8))
    found = Optimizer([("fc.weight", weight), ("norm.weight", nn.Parameter(torch.ones(3)))], DraftSettings())

    def step(length: float) -> float:
        assert weight.grad is not None
        weight.grad += length / 48**0.5
        norm, skipped = found.step(RATE)
        assert float(norm) == pytest.approx(length)
        return float(skipped)

    # The running mean is 1, then a tenth of the way to 90.
    assert [step(length) for length in (1.0, 101.0, 90.0, 500.0, 1200.0)] == [0, 1, 0, 0, 0]
    before = weight.detach().clone()
    assert step(1e6)
    assert torch.equal(weight, before)


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    settings = DraftSettings(learning_rate=0.3, warmup=0.1)
    rates = [learning_rate(settings, step, 200) for step in range(200)]
    assert rates[:20] == pytest.approx([0.3 * (step + 1) / 20 for step in range(20)])
    assert max(rates) == pytest.approx(0.3)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[20 + 60] == pytest.approx(0.3 * (1 + math.cos(math.pi / 3)) / 2)
    assert rates[20 + 90] == pytest.approx(0.15)
    assert 0 < rates[-1] < 1e-3 * 0.3
    assert learning_rate(DraftSettings(learning_rate=0.3, warmup=0.0), 0, 1) == 0.3


# Kind, and the parameters: sizes that do not divide evenly, and a single matrix for three ranks of Muon.
SHARED: list[tuple[Literal["muon", "adamw"], dict[str, tuple[int, ...]]]] = [
    ("muon", SHAPES | {"q.weight": (16, 40), "bias": (23,)}),
    ("muon", {"fc.weight": (24, 40), "lm_head.weight": (31, 24), "norm.weight": (5,)}),
    ("adamw", SHAPES | {"q.weight": (16, 40), "bias": (23,)}),
]
ROWS, STEPS, HALF = 6, 8, 4


def train_shared(folder: Path, first: int, last: int) -> None:
    """On every rank: steps `first` .. `last`-1 of all cases, each from a file of the folder to one for every rank."""
    torch.set_num_threads(1)
    for case, (kind, shapes) in enumerate(SHARED):
        generator = torch.Generator().manual_seed(0)
        weights = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        found = Optimizer(weights.items(), DraftSettings(optimizer=kind, weight_decay=DECAY))
        if first:
            before = load_file(folder / f"{case}-{first}-0")
            for name, weight in weights.items():
                weight.data.copy_(before.pop(name))
            found.load_state(before)
        for step in range(first, last):
            initial = {name: weight.detach().clone() for name, weight in weights.items()} | found.state()
            for row in range(ROWS):
                generator = torch.Generator().manual_seed(ROWS * step + row)
                for weight in weights.values():
                    gradient = torch.randn(weight.shape, generator=generator)
                    if row % parallel.world() == parallel.rank():
                        assert weight.grad is not None
                        # One row spoils the first step.
                        weight.grad += gradient * math.nan if step == row == 0 else gradient
            skipped = bool(found.step(RATE)[1])
            assert skipped == (step == 0)
            if skipped:
                after = {**weights, **found.state()}
                assert all(torch.equal(value, after[name]) for name, value in initial.items())
            assert not any(bool(weight.grad.any()) for weight in weights.values() if weight.grad is not None)
        left = {name: weight.detach().clone() for name, weight in weights.items()} | found.state()
        save_file(left, folder / f"{case}-{last}-{parallel.rank()}")


@pytest.mark.usefixtures("on_the_cpu")
def test_any_number_of_processes_trains_and_continues_as_one_does(tmp_path: Path) -> None:
    """Three ranks train half of the steps; one and two continue from there. All end where one rank alone does."""
    alone, shared, resumed = (tmp_path / name for name in ("alone", "shared", "resumed"))
    for folder in (alone, shared, resumed):
        folder.mkdir()
    train_shared(alone, 0, HALF)
    train_shared(alone, 0, STEPS)
    parallel.launch(3, functools.partial(train_shared, shared, 0, HALF))
    for case in range(len(SHARED)):
        (resumed / f"{case}-{HALF}-0").write_bytes((shared / f"{case}-{HALF}-0").read_bytes())
    train_shared(resumed, HALF, STEPS)
    parallel.launch(2, functools.partial(train_shared, shared, HALF, STEPS))
    for case in range(len(SHARED)):
        for step, others in (HALF, range(3)), (STEPS, range(2)):
            expected_values = load_file(alone / f"{case}-{step}-0")
            for path in [shared / f"{case}-{step}-{rank}" for rank in others] + [resumed / f"{case}-{step}-0"]:
                torch.testing.assert_close(load_file(path), expected_values, atol=2e-6, rtol=1e-5)
