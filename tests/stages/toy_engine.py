"""An engine whose answers are a function of what it is asked, for tests of the stage that drives it.

As a script it runs the stage and kills itself with SIGKILL after some answers:
`python toy_engine.py TARGET_JSON PROMPTS FOLDER BATCH_SIZE SHARDS KILL_AFTER`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.chat.template import Chat, load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.responses import ResponsesSettings
from eagle3.engines.base import Capture, Generation, GenerationRequest, Sampling, Served
from eagle3.stages import responses
from eagle3.target.pin import Target


class ToyEngine:
    """Answers with ids hashed from prompt and seed, and, if batched, from everything else in the batch.

    The second part stands for rounding that depends on what is computed together.
    """

    name = "toy"

    def __init__(self, target: Target, batch_size: int | None, kill_after: int | None = None) -> None:
        self.versions = {"toy": "1"}
        self.batch_size = batch_size
        self.groups: list[list[GenerationRequest]] = []
        self.failing: set[str] = set()
        self._chat: Chat = load_chat(target)
        self._answers_left = kill_after

    def __enter__(self) -> ToyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        assert self.batch_size is None or len(requests) <= self.batch_size
        self.groups.append(list(requests))
        prompts = [self._chat.render(request.messages) for request in requests]
        context = str(prompts) if self.batch_size else ""
        # Not in the order of the requests: nothing may rely on it.
        for request, prompt in sorted(zip(requests, prompts, strict=True), key=lambda pair: pair[0].id[::-1]):
            if self._answers_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._answers_left is not None:
                self._answers_left -= 1
            if request.id in self.failing:
                yield Generation(request.id, [], [], "error", {}, error="engine_error: out of luck")
                continue
            digest = hashlib.sha256(f"{prompt} {request.seed} {context}".encode()).digest()
            ids = [60 + byte for byte in digest[: sampling.max_tokens - 1]] + [2]
            yield Generation(request.id, prompt, ids, "stop", self._chat.parse(prompt, ids))

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        raise NotImplementedError

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        raise NotImplementedError


def main(target: str, prompts: str, folder: str, batch_size: str, shards: str, kill_after: str) -> dict[str, Any]:
    def open_engine(_: EngineSettings, __: MachineSettings, pinned: Target, ___: Path) -> ToyEngine:
        return ToyEngine(pinned, int(batch_size) or None, int(kill_after))

    setattr(responses, "open_engine", open_engine)  # noqa: B010
    return responses.make(
        ResponsesSettings(max_tokens=12, shards=int(shards)),
        EngineSettings(),
        MachineSettings(),
        target=Path(target),
        prompts=Path(prompts),
        folder=Path(folder),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
