"""Products in float8 are the exact ones up to its rounding, and what is not finite stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.draft.data.row import build_row
from eagle3.draft.ops.float8 import quantise, require_float8
from eagle3.draft.ops.linear import Weight, add_linear, input_backward, linear, linear_backward
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from eagle3.errors import Eagle3Error
from tests.draft.conftest import H, V, random_draft, random_states, tiny_config


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def restored(x: Tensor) -> Tensor:
    values, scales = quantise(x)
    return values.double() * scales


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_uses_the_whole_range_and_rounds_to_the_nearest(dtype: torch.dtype) -> None:
    # Rows, and the values in each, differ by many powers of two.
    x = (randn(64, 160) * torch.exp2(10 * randn(64, 1) + 4 * randn(64, 160))).to(dtype)
    values, scales = quantise(x)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(scales.frexp().mantissa, torch.full((64, 1), 0.5))
    largest = values.float().abs().amax(1)
    assert bool(((largest >= 224) & (largest <= 448)).all())
    # Half a step: 2^-4 of a value that is normal in e4m3, 2^-10 of the scale below that.
    bound = torch.maximum(x.double().abs() * 2**-4, scales.double() * 2**-10)
    assert bool(((restored(x) - x.double()).abs() <= bound).all())


def test_limits_of_a_power_of_two() -> None:
    x = torch.tensor([[447.0, 1.0], [448.0, 1.0], [-512.0, 1.0], [1.74, 0.0], [1.75, 0.0]])
    assert quantise(x)[1][:, 0].tolist() == [1.0, 2.0, 2.0, 2.0**-8, 2.0**-7]


def test_zeros_stay_zeros_and_a_huge_value_costs_only_its_row() -> None:
    x = randn(4, 32)
    x[1], x[2, 5] = 0, 1e30
    assert torch.equal(restored(x)[1], torch.zeros(32, dtype=torch.float64))
    assert float(restored(x)[2, 5]) == pytest.approx(1e30, rel=2**-4)
    assert torch.equal(restored(x)[[0, 3]], restored(x[[0, 3]]))
    tiny = torch.full((1, 16), 1e-40)
    assert bool((restored(tiny).abs() <= 1e-38).all())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x, w = randn(5, 32), randn(48, 32)
    x[3, 7] = value
    out = linear(x, Weight(w, ()).in_float8())
    assert not bool(out[3].isfinite().any())
    assert bool(out[[0, 1, 2, 4]].isfinite().all())
    w[9, 1] = value
    weight = Weight(w, ()).in_float8()
    assert not bool(linear(randn(5, 32), weight)[:, 9].isfinite().any())
    assert not bool(input_backward(randn(5, 48), weight)[:, 1].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_those_of_the_restored_factors(dtype: torch.dtype) -> None:
    weight = Weight(randn(48, 32).to(dtype), ()).in_float8()
    x, d_out, plus = randn(7, 32).to(dtype), randn(7, 48).to(dtype), randn(7, 48).to(dtype)
    w = weight.value
    forward, backward = restored(x) @ restored(w).T, restored(d_out) @ restored(w.T).T
    rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert error(linear(x, weight), forward) < rounding
    assert error(linear(x, weight, plus), forward + plus) < rounding
    assert error(add_linear(plus.clone(), x, weight), forward + plus) < rounding
    assert error(input_backward(d_out, weight), backward) < rounding
    # Rounding to three bits costs each factor some 2.6 %.
    assert 0.01 < error(linear(x, weight), x.double() @ w.double().T) < 0.06
    assert 0.01 < error(input_backward(d_out, weight), d_out.double() @ w.double()) < 0.06


def test_gradients_of_weights_are_added_up_outside_of_float8() -> None:
    first, second = (torch.nn.Parameter(randn(size, 32)) for size in (32, 16))
    x, d_out = randn(7, 32), randn(7, 48)
    weight = Weight.of(torch.float32, first, second).in_float8()
    with torch.no_grad():
        for _ in range(2):
            d_x = linear_backward(d_out, x, weight)
    assert torch.equal(d_x, input_backward(d_out, weight))
    assert first.grad is not None
    assert second.grad is not None
    torch.testing.assert_close(torch.cat([first.grad, second.grad]), 2 * d_out.T @ x)


def test_weights_of_other_lengths_and_the_vocabulary_are_not_rounded() -> None:
    for shape in ((24, 32), (32, 24)):
        assert Weight(randn(*shape), ()).in_float8().float8 is None
    draft = random_draft(tiny_config(), torch.Generator().manual_seed(1))
    weights = prepare(draft, torch.float32, float8=True)
    halves = [*weights.projections.token[:2], *weights.projections.feature]
    layer = [weights.fc, *halves, weights.output, weights.gate_up, weights.down]
    assert all(weight.float8 is not None for weight in layer)
    assert weights.lm_head.float8 is None


@pytest.mark.parametrize("changes", [{}, {"latent": True, "fc_norm": True, "norm_output": True}])
def test_a_pass_gives_the_gradients_of_the_exact_one(changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    draft, embedding = random_draft(tiny_config(**changes), generator), torch.randn(V, H, generator=generator)
    row = build_row([(random_states("a", 60, [(3, 60)], generator), [(3, 60)])], unroll=3)
    factors = torch.randn(sum(row.alive), H, generator=generator)

    def gradients(*, float8: bool) -> dict[str, Tensor]:
        draft.zero_grad()
        (unroll(prepare(draft, torch.float32, float8=float8), row, embedding) * factors).sum().backward()
        return {name: p.grad.flatten() for name, p in draft.named_parameters() if p.grad is not None}

    exact, found = gradients(float8=False), gradients(float8=True)
    for name, gradient in exact.items():
        if name != "lm_head.weight":
            cosine = float(torch.cosine_similarity(found[name], gradient, 0))
            print(name, cosine)
            assert 0.98 < cosine < 0.999999, name


def test_devices_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "mps"):
        with pytest.raises(Eagle3Error, match="does not support float8"):
            require_float8(torch.device(device))
    capabilities = [(8, 6), (8, 9), (9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capabilities.pop(0))
    with pytest.raises(Eagle3Error, match=r"a GPU, compute capability 8\.6"):
        require_float8(torch.device("cuda"))
    while capabilities:
        require_float8(torch.device("cuda"))
