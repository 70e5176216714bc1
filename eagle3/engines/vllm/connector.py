"""Runs inside vLLM: writes the hidden states of finished requests to files, on CPU and GPU.

vLLM's method `extract_hidden_states` keeps the states of every prompt token in its own cache. Its
`ExampleHiddenStatesConnector` copies them out, but needs CUDA, and a reader can find a half-written file. Here a
file is complete when it appears under its final name, or a file with the suffix `.error` says what failed.

vLLM loads this class by name (`kv_connector_module_path`); nothing in vLLM is patched. Written for vLLM 0.32.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eagle3.files.atomic import atomic_write


class _Done:
    """The event of a completed copy: on a CPU there is nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes `{request}.safetensors`: `hidden_states` [n, L, H], `token_ids` int64 [n]; metadata `layer_ids`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No locks are needed: a file is complete when it has its name.
        self.use_lock = False
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        self._layer_ids = json.dumps(list(config.eagle_aux_hidden_state_layer_ids))

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy the request's rows out of the cache and hand them to a writer thread."""
        if not self._is_tp_rank_zero:
            return
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)  # [blocks]
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        tensors = {
            "hidden_states": extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous(),
            "token_ids": pending.token_ids,
        }
        event = _Done()
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, None)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """Write one complete file, or an error file; runs in a writer thread."""
        path = Path(filename)
        try:
            event.synchronize()
            publish(path, tensors, {"layer_ids": self._layer_ids})
        except Exception as error:
            path.with_suffix(".error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            raise


def publish(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that it never exists incomplete under its name."""
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
