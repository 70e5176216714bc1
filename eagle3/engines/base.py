"""One interface to whatever runs the target model.

Every engine takes token ids or messages and gives token ids back: text is never rendered twice. Results are matched
to requests by what they hold (ids of the request, token ids), never by order, time or count.
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

    `prompt_ids` are for requests whose prompt was rendered before: they are used as they are, instead of the messages.
    """

    id: str
    seed: int
    prompt_ids: list[int] | None = None


@dataclass(frozen=True)
class Generation:
    """What the engine produced for one request, token-exact.

    `message` is the assistant message as history wants it (content, reasoning, tool_calls). `error`
    ("code: detail") is set when the request failed for good; then the ids are empty.
    """

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    message: Message
    raw: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def failed(request: GenerationRequest, code: str, detail: str) -> Generation:
    """Return the record of a request that failed for good."""
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
    """What serving a set of prompts gave, with or without a draft.

    `accepted` counts, for each draft position, the drafts that the target kept; all are 0 without a draft.
    """

    token_ids: dict[str, list[int]]
    """Request id -> generated ids."""
    drafts: dict[str, int]
    """Request id -> verification steps with a draft."""
    accepted: dict[str, list[int]]
    """Request id -> accepted drafts by position (length k)."""
    seconds: float
    durations: dict[str, float]
    """Request id -> seconds from asking to the end of the answer."""


class Engine(AbstractContextManager["Engine"], Protocol):
    """What every engine offers."""

    name: str
    versions: dict[str, str]
    batch_size: int | None
    """Requests that are computed together, so that their rounding depends on each other; None: independent."""
    sampling_fault: str | None
    """Why sampled answers with a draft cannot be trusted here; None if they can."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Generate one turn for every request, in any order."""

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        """Capture the hidden states of every sequence, in any order."""

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        """Answer every request, with `draft` (an exported folder) proposing `k` tokens a step if given."""

    def logit_gaps(self, prefixes: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]) -> list[float]:
        """Return logit(first) - logit(second) of a pair of tokens after each prefix, as serving has them.

        Where greedy answers with and without a draft part, a gap of rounding's size excuses it.
        """


def open_engine(
    settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path | None = None
) -> Engine:
    """Return the configured engine, as a context manager.

    The module is imported by name so that an edit of one engine does not count for artifacts of another.

    Args:
        settings: which engine, and what bears on its answers.
        machine: where and how fast it runs.
        target: the model.
        folder: the job's work folder, where a managed server keeps its log; None for a temporary one.
    """
    module = importlib.import_module(ENGINES[settings.name])
    engine: Engine = module.open_engine(settings, machine, target, folder)
    return engine
