"""Reads the files in which our connector (`eagle3.engines.vllm.connector`) hands over hidden states."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3.errors import Eagle3Error, RejectedError

# The file is written after the answer is sent: a matter of seconds, even on a busy disk.
_DEADLINE = 120.0
_POLL = 0.005


async def take_states(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """Wait for a file, read it, remove it; return its states [n, L, H].

    Raises:
        RejectedError: `not_written`: the connector failed to write the file, or it did not appear.
        Eagle3Error: the file has other tokens or other layers than requested.
    """
    deadline = time.monotonic() + _DEADLINE
    problem = path.with_suffix(".error")
    while not path.exists():
        if problem.exists():
            raise RejectedError("not_written", problem.read_text(encoding="utf-8"))
        if time.monotonic() > deadline:
            raise RejectedError("not_written", f"{path} did not appear in {_DEADLINE:.0f} s")
        await asyncio.sleep(_POLL)
    states = await asyncio.to_thread(_read, path, token_ids, layer_ids)
    path.unlink()
    return states


def _read(path: Path, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        layers = json.loads((file.metadata() or {}).get("layer_ids", "null"))
        found = file.get_tensor("token_ids").tolist()
        states: torch.Tensor = file.get_tensor("hidden_states")
    if layers != list(layer_ids):
        raise Eagle3Error(
            "the server captures other layers than requested",
            where=path,
            found=layers,
            expected=list(layer_ids),
            remedy="start it with these eagle_aux_hidden_state_layer_ids and our connector, or let us manage it",
        )
    if found != list(token_ids) or len(states) != len(found):
        raise Eagle3Error(
            "captured states do not belong to the tokens that were sent",
            where=path,
            found=f"{len(states)} rows, {len(found)} tokens",
            expected=f"{len(token_ids)} of each, with the ids that were sent",
            remedy="prefix caching and chunked prefill must be off at the server",
        )
    return states
