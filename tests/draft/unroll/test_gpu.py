"""On a GPU the same pass runs in bfloat16 on fused kernels: it gives the plain float32 result up to rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from eagle3.config.draft import DraftSettings
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.config import DraftConfig, LatentShape
from eagle3.draft.model.network import Draft
from eagle3.draft.ops import logits
from eagle3.draft.ops.adamw import adamw
from eagle3.draft.ops.float8 import Scaled, product, quantise
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from eagle3.hidden_states.reader import HiddenStateSample
from eagle3.target.weights import HeadWeights
from tests.draft.unroll.steps import Steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
)

H, V, Vd = 256, 1003, 401
UNROLL = 5
Loss = Literal["kl", "lk_alpha", "lk_lambda"]
# Odd lengths, holes between spans, a sample of one root, and one that is longer than a kernel's block.
SPANS = [[(6, 41)], [(0, 5), (9, 140), (300, 333)], [(4, 7)], [(517, 1030)]]
LATENT = LatentShape(q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {"attention": "gqa", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "mha": {"attention": "gqa", "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 128},
    "mla": {
        "attention": "mla",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "latent": LATENT,
    },
}


def make(shape: str, generator: torch.Generator, **changes: Any) -> tuple[Draft, HeadWeights]:
    """A random draft and head whose values bfloat16 holds exactly."""
    config = DraftConfig(
        hidden_size=H,
        intermediate_size=512,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=V,
        draft_vocab_size=Vd,
        aux_layer_ids=(1, 2, 3),
        **({"fc_norm": False, "norm_output": False, "norm_before_residual": False} | changes),
        **SHAPES[shape],
    )
    chosen = torch.randperm(V, generator=generator)[:Vd].sort().values
    t2d = torch.zeros(V, dtype=torch.bool).index_fill_(0, chosen, True)
    draft = Draft(config, chosen - torch.arange(Vd), t2d)
    for parameter in draft.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        values = scale * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
        parameter.data = values.bfloat16().float()
    embedding, lm_head = (torch.randn(V, H, generator=generator).bfloat16().float() for _ in range(2))
    return draft, HeadWeights(embedding, torch.ones(H), (lm_head / 8).bfloat16().float(), 1e-5)


def make_row(generator: torch.Generator, *, sampled: bool) -> Row:
    samples = []
    for number, spans in enumerate(SPANS):
        n = spans[-1][1]
        rows = [row for start, end in spans for row in range(max(start - 1, 0), end - 1)]
        states = HiddenStateSample(
            id=str(number),
            token_ids=torch.randint(V, (n,), generator=generator, dtype=torch.int32),
            aux=torch.randn(n, 3, H, generator=generator).bfloat16(),
            last=torch.randn(len(rows), H, generator=generator).bfloat16(),
            last_rows=torch.tensor(rows),
        )
        samples.append((states, spans))
    return build_row(samples, UNROLL, 0.7, np.random.default_rng(0)) if sampled else build_row(samples, UNROLL)


def run(
    draft: Draft,
    head: HeadWeights,
    row: Row,
    loss: Loss,
    device: torch.device,
    dtype: torch.dtype,
    *,
    float8: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    draft = draft.to(device)
    draft.zero_grad()
    weights = prepare(draft, dtype, float8=float8)
    row = row.with_teacher_stats([TeacherHead(head, draft.target_ids, device, dtype)(row.teacher)]).to(device)
    teacher = Teacher.of(head, draft.target_ids, device, dtype)
    # On the true mass nothing depends on which of two almost equal logits is larger.
    objective = Objective.of(DraftSettings(unroll=UNROLL, loss=loss, true_mass=True), sampled=False)
    hidden = unroll(weights, row, head.embedding.to(device, dtype))
    outcome = projected_loss(hidden, weights.lm_head, teacher, row, objective, row.alive)
    hidden.backward(outcome.gradient)
    gradients = {name: p.grad.double().cpu() for name, p in draft.named_parameters() if p.grad is not None}
    return outcome.total.double().cpu(), gradients


def agree(draft: Draft, head: HeadWeights, row: Row, loss: Loss = "kl", bound: float = 0.04) -> None:
    exact, expected = run(draft, head, row, loss, torch.device("cpu"), torch.float32)
    fast, found = run(draft, head, row, loss, torch.device("cuda"), torch.bfloat16)
    assert abs(fast - exact) / abs(exact) < 1e-2
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        print(f"{name} {error:.4f}")
        assert error < bound, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_loss_and_gradients_of_the_exact_and_the_sampled_unroll(shape: str, sampled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    draft, head = make(shape, generator)
    agree(draft, head, make_row(generator, sampled=sampled))


# The gradient of an acceptance jumps where the draft's probability of a token crosses the target's: rounding alone
# moves about one in a hundred to the other side.
@pytest.mark.parametrize(("loss", "bound"), [("lk_alpha", 0.12), ("lk_lambda", 0.04)])
def test_other_losses(loss: Loss, bound: float) -> None:
    generator = torch.Generator().manual_seed(2)
    draft, head = make("gqa", generator)
    agree(draft, head, make_row(generator, sampled=False), loss, bound)


def test_other_norms() -> None:
    generator = torch.Generator().manual_seed(3)
    draft, head = make("gqa", generator, fc_norm=True, norm_output=True, norm_before_residual=True)
    agree(draft, head, make_row(generator, sampled=False))


@needs_float8
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_gradients_in_float8(shape: str, sampled: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    draft, head = make(shape, generator)
    row = make_row(generator, sampled=sampled)
    loss, expected = run(draft, head, row, "kl", torch.device("cuda"), torch.bfloat16)
    rounded, found = run(draft, head, row, "kl", torch.device("cuda"), torch.bfloat16, float8=True)
    assert abs(rounded - loss) / abs(loss) < 2e-2
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        cosine = float(torch.cosine_similarity(found[name].flatten(), gradient.flatten(), 0))
        print(f"{name} {cosine:.5f}")
        assert cosine > 0.98, name
        # The bound would hold for bfloat16, too.
        assert not torch.equal(found[name], gradient), name


@needs_float8
@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize("size", [16, 4096, 28672, 36864])
def test_rounding_to_float8(n: int, size: int) -> None:
    """The kernel gives the plain result bit by bit, and a product what the restored factors give."""
    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(n, size, generator=generator) * torch.exp2(torch.randn(n, 1, generator=generator))).bfloat16()
    values, scales = quantise(x)
    fast_values, fast_scales = quantise(x.cuda())
    assert torch.equal(fast_scales.cpu(), scales)
    assert torch.equal(fast_values.cpu().view(torch.uint8), values.view(torch.uint8))
    weight = torch.randn(48, size, generator=generator).bfloat16()
    cut = Scaled(*quantise(weight))
    exact = (values.double() * scales) @ (cut.values.double() * cut.scales).T
    found = product(x.cuda(), Scaled(*quantise(weight.cuda()))).double().cpu()
    assert float((found - exact).norm() / exact.norm()) < 5e-3
    x[n // 2, size // 2], x[0, 0] = torch.nan, -torch.inf
    out = product(x.cuda(), Scaled(*quantise(weight.cuda()))).cpu()
    spoiled = torch.zeros(n, dtype=torch.bool).index_fill_(0, torch.tensor([0, n // 2]), True)
    assert torch.equal(out.isfinite(), ~spoiled[:, None].expand(n, 48))


@pytest.mark.parametrize("shape", ["gqa", "mla"])
@pytest.mark.parametrize("settings", [{}, {"loss": "lk_lambda", "optimizer": "adamw"}], ids=str)
def test_a_step_never_waits_for_the_gpu(shape: str, settings: dict[str, Any], tmp_path: Path) -> None:
    draft, head = make(shape, torch.Generator().manual_seed(5))
    steps = Steps(draft.cuda(), head, DraftSettings(unroll=UNROLL, **settings), 60, tmp_path)
    numbers = range(4)
    # Compiled, and recorded as graphs.
    for _ in range(2):
        for number in numbers:
            steps.take(number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in numbers:
            steps.take(number)
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(steps.trainer.skipped)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(steps.trainer.skipped) == 0


def compiled_kernels() -> dict[str, int]:
    """How many variants of every Triton kernel of ours are compiled."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("eagle3.draft.ops.") and name.endswith("_kernel")
    ]
    kernels = {k.__name__: k for module in modules for k in vars(module).values() if hasattr(k, "device_caches")}
    return {name: sum(len(c[0]) for c in kernel.device_caches.values()) for name, kernel in kernels.items()}


@pytest.mark.parametrize("shape", ["gqa", "mla"])
@pytest.mark.parametrize("loss", ["kl", "lk_lambda"])
def test_new_lengths_rarely_recompile(shape: str, loss: Loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several chunks a row, the last one of any length.
    monkeypatch.setitem(logits.CHUNK_BYTES, "cuda", 16 << 20)
    torch._dynamo.reset()
    counters.clear()
    draft, head = make(shape, torch.Generator().manual_seed(6))
    steps = Steps(draft.cuda(), head, DraftSettings(unroll=UNROLL, loss=loss), 600, tmp_path)
    before, rows = compiled_kernels(), 50
    for number in range(rows):
        steps.take(number)
    after = compiled_kernels()
    # Two functions, of which torch would compile eight each and run the rest uncompiled.
    assert 1 <= counters["stats"]["unique_graphs"] <= 8
    # Divisibility and the like cause some variants; lengths as constants would cause one per row.
    assert after
    assert all(count - before.get(name, 0) < rows / 2 for name, count in after.items())


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_adamw(skipped: float) -> None:
    # Begins anywhere and ends inside a block; what is skipped may hold anything.
    before = torch.randn(4, 2503, generator=torch.Generator().manual_seed(5))
    before[2].abs_()
    if skipped:
        before[3, ::2] = torch.nan

    def after(device: str) -> Tensor:
        whole = before.clone().to(device)
        values, first, second, gradient = whole[:, 3:]
        scale, skip, corrections = (torch.tensor(value, device=device) for value in (3.0, skipped, [0.1, 0.05]))
        adamw(values, first, second, gradient, scale, skip, corrections, 1e-2, 0.1)
        return whole.cpu()

    torch.testing.assert_close(after("cuda")[:, 3:], after("cpu")[:, 3:], rtol=1e-5, atol=1e-6)
