"""Runs inside vLLM, which loads it by name (`--worker-cls`): writes down every draft that is proposed.

The file EAGLE3_TEST_PROPOSALS gets a line per proposal: [the tokens so far, the draft tokens that follow them].
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if torch.cuda.is_available():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class Recorder(Worker):  # type: ignore[misc]
    """vLLM's own worker, with the drafter recorded."""

    def load_model(self, **options: Any) -> None:
        """Load the model, then record the drafter, if there is one."""
        super().load_model(**options)
        self.contexts: dict[str, list[int]] = {}
        if drafter := getattr(self.model_runner, "drafter", None):
            drafter.propose = self._overheard(drafter.propose)

    def _overheard(self, propose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def proposed(**inputs: Any) -> torch.Tensor:
            starts = inputs["common_attn_metadata"].query_start_loc.tolist()
            roots = inputs["token_indices_to_sample"]
            roots = [end - 1 for end in starts[1:]] if roots is None else roots.tolist()
            read, places, next_tokens = (
                inputs[name].tolist() for name in ("target_token_ids", "target_positions", "next_token_ids")
            )
            drafts = propose(**inputs)
            with Path(os.environ["EAGLE3_TEST_PROPOSALS"]).open("a") as file:
                for row, request in enumerate(self.model_runner.input_batch.req_ids):
                    start, root = starts[row], roots[row]
                    prompt = self.model_runner.requests[request].prompt_token_ids
                    context = self.contexts.setdefault(request, list(prompt))
                    # What was read after a rejected draft is read again.
                    context[places[start] :] = [*read[start : root + 1], next_tokens[row]]
                    file.write(json.dumps([context, drafts[row].tolist()]) + "\n")
            return drafts

        return proposed
