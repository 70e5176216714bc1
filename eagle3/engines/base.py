"""The interface of every engine that runs the target model.

An engine takes token ids or messages and returns token ids: text is never rendered twice. Results are matched to
requests by their content (request id, token ids), never by order, time or count.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3.chat.message import ChatPrompt
from eagle3.records import Message

if TYPE_CHECKING:
    import torch

    from eagle3.config.engine import EngineSettings
    from eagle3.config.machine import MachineSettings
    from eagle3.target.pin import Target

ENGINES = {
    "transformers": "eagle3.engines.transformers.engine",
    "vllm": "eagle3.engines.vllm.engine",
    "openai": "eagle3.engines.openai",
}
"""Engine -> the module whose `open_engine` returns it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(ChatPrompt):
    """One turn to generate.

    `prompt_ids` belong to a prompt that is already rendered: they are used unchanged, instead of the messages.
    """

    id: str
    seed: int
    prompt_ids: list[int] | None = None


@dataclass(frozen=True)
class Generation:
    """The engine's answer to one request, token-exact.

    `message` is the assistant message for the next turn's history (content, reasoning, tool_calls). `error`
    ("code: detail") is set if the request failed and is not retried; then the ids are empty.
    """

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    message: Message
    raw: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def failed(request: GenerationRequest, code: str, detail: str) -> Generation:
    """Return the result of a request that failed and is not retried."""
    return Generation(
        id=request.id,
        prompt_ids=[],
        token_ids=[],
        finish_reason="error",
        message={"role": "assistant", "content": ""},
        error=f"{code}: {detail}",
    )


@dataclass(frozen=True)
class Capture:
    """Hidden states of one token sequence.

    `states` is [n, L, H]: for each layer id i, ascending, the residual stream *entering* layer i; the last one
    (i = number of layers) is the output of the last layer before the final norm. `next_token` is the engine's
    own greedy token after the sequence: the teacher check compares it with argmax(lm_head(norm(states[-1, -1]))).
    """

    token_ids: list[int]
    states: torch.Tensor
    next_token: int


@dataclass(frozen=True)
class Served:
    """The result of serving a set of prompts, with or without a draft model.

    `accepted` counts the accepted draft tokens by position; all are 0 without a draft model.
    """

    token_ids: dict[str, list[int]]
    """Request id -> generated ids."""
    steps: dict[str, int]
    """Request id -> verification steps with draft tokens."""
    accepted: dict[str, list[int]]
    """Request id -> accepted draft tokens by position (length k)."""
    seconds: float
    durations: dict[str, float]
    """Request id -> seconds from the request to the end of the answer."""


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs the target; a context manager that frees the model or ends the server on exit."""

    name: str
    versions: dict[str, str]
    batch_size: int | None
    """Number of requests that are computed together and affect each other's rounding; None if independent."""
    sampling_fault: str | None
    """Why sampled answers with a draft model are wrong in this engine; None if they are right."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Generate one turn for every request, in any order."""

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        """Capture the hidden states of every sequence, in any order."""

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        """Answer every request; `draft` (an exported folder), if given, proposes `k` tokens a step."""

    def logit_gaps(self, prefixes: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]) -> list[float]:
        """Return logit(first) - logit(second) of a pair of tokens after each prefix, computed as in serving.

        A gap within rounding explains why greedy answers with and without a draft model differ.
        """


def open_engine(
    settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path | None = None
) -> Engine:
    """Return the configured engine, as a context manager.

    The module is imported by name, so that an edit of one engine does not count for artifacts of another.

    Args:
        settings: which engine, and what affects its output.
        machine: where it runs, and with which resources.
        target: the model.
        folder: the job's work folder, for the log of a managed server; None for a temporary one.
    """
    module = importlib.import_module(ENGINES[settings.name])
    engine: Engine = module.open_engine(settings, machine, target, folder)
    return engine
