"""Hidden states from the real vLLM, against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture, open_engine
from eagle3.engines.vllm.engine import VllmEngine
from eagle3.target.pin import Target
from tests.engines.conftest import REAL_VLLM

pytestmark = REAL_VLLM

SETTINGS = EngineSettings(name="vllm", dtype="float32")
MACHINE = MachineSettings(threads=1, concurrency=4, buffer_mb=1, engine_arguments=("--kv-cache-memory-bytes", "200M"))


def sequences(vocab_size: int) -> list[list[int]]:
    """Sequences of many lengths, over and under a block, some of them prefixes of others, one of a single token."""
    generator = torch.Generator().manual_seed(3)
    long: list[int] = torch.randint(12, vocab_size, (300,), generator=generator).tolist()
    others = [torch.randint(12, vocab_size, (n,), generator=generator).tolist() for n in (1, 2, 31, 32, 33, 97)]
    return [long, long[:128], long[:129], *others]


def reference(target: Target, tokens: Sequence[int], layer_ids: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the states [n, L, H] entering the layers, and the greedy next token, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    states: dict[int, torch.Tensor] = {}
    places = {**dict(enumerate(model.model.layers)), target.num_layers: model.model.norm}
    for place, module in places.items():
        module.register_forward_pre_hook(lambda _, inputs, place=place: states.update({place: inputs[0][0]}))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    return torch.stack([states[id] for id in layer_ids], dim=1), int(logits[0, -1].argmax())


def check(target: Target, captures: Sequence[Capture], layer_ids: Sequence[int]) -> None:
    for capture in captures:
        expected, next_token = reference(target, capture.token_ids, layer_ids)
        assert capture.states.shape == expected.shape
        assert capture.states.dtype == torch.float32
        error = (capture.states - expected).norm(dim=-1) / expected.norm(dim=-1)  # [n, L]
        assert error.max() < 1e-4
        assert capture.next_token == next_token


@pytest.fixture(params=["llama", "deepseek"], scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


def test_states_are_those_of_transformers(target: Target, tmp_path: Path) -> None:
    layer_ids = (1, 2, target.num_layers - 1, target.num_layers)
    wanted = sequences(target.vocab_size)
    buffer = MACHINE.buffer_mb << 20
    assert sum(map(len, wanted)) * len(layer_ids) * target.hidden_size * 4 > buffer, "they do not fit at once"
    captures: list[Capture] = []
    with open_engine(SETTINGS, MACHINE, target, tmp_path) as engine:
        assert isinstance(engine, VllmEngine)
        for capture in engine.capture([*wanted, [5] * 600], layer_ids):
            assert sum(file.stat().st_size for file in engine._states.iterdir()) <= buffer
            captures.append(capture)
        # The one that is longer than the context is left out; the engine serves on.
        assert sorted(capture.token_ids for capture in captures) == sorted(wanted)
        again = list(engine.capture(wanted[:2], layer_ids))
        assert list(engine._states.iterdir()) == []
        check(target, [*captures, *again], layer_ids)
    assert not engine._states.exists()
    assert (tmp_path / ".vllm.log").read_text().count("Application startup complete") == 1
