"""Clipping and skipping, by torch's fused kernel and where that knows neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3.draft import optimizer
from eagle3.draft.optimizer import Optimizer
from eagle3.draft.settings import DraftSettings

SETTINGS = DraftSettings(max_grad_norm=0.5, weight_decay=0.1)


def trained(gradients: list[float]) -> Sequence[Tensor]:
    """A matrix and a norm after steps whose gradients are noise times the factors."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (4,))]
    found = Optimizer(parameters, SETTINGS)
    for factor in gradients:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad += factor * torch.randn(parameter.shape, generator=generator)
        found.step(0.01)
    return parameters


def expected(gradients: list[float]) -> Sequence[Tensor]:
    """The same by torch's plain AdamW and clipping."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (4,))]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(parameters, (0.1, 0.0), strict=True)]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=optimizer.BETAS)
    for factor in gradients:
        for parameter in parameters:
            parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
        norm: Any = nn.utils.clip_grad_norm_(parameters, SETTINGS.max_grad_norm)
        if norm.isfinite():
            plain.step()
    return parameters


@pytest.mark.parametrize("kernel_scales", [True, False])
def test_long_gradients_are_clipped_and_spoiled_ones_skipped(
    kernel_scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_scales:
        monkeypatch.setattr(optimizer, "IGNORES_SCALE", frozenset({"cpu"}))
        step = torch.optim.AdamW.step

        def as_on_apple(self: Any, closure: Any = None) -> Any:
            assert getattr(self, "grad_scale", None) is None, "the kernel would ignore it"
            assert getattr(self, "found_inf", None) is None, "the kernel would ignore it"
            return step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", as_on_apple)
    gradients = [0.01, 100.0, float("nan"), 3.0, float("inf"), 0.1]
    for ours, theirs in zip(trained(gradients), expected(gradients), strict=True):
        torch.testing.assert_close(ours, theirs)
