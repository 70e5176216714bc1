"""Any OpenAI-compatible endpoint, for responses only: it returns text, from which the ids are rebuilt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from openai import AsyncOpenAI

from eagle3.chat.rebuild import rebuild
from eagle3.chat.template import load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture, Generation, GenerationRequest, Sampling, Served, failed
from eagle3.engines.http.client import Client, ServerLostError, api_key
from eagle3.engines.http.completion import body_of, read_message, read_raw
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.target.pin import Target


def open_engine(
    settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path | None = None
) -> OpenAIEngine:
    """Return the endpoint at `machine.base_url`; the key is read from OPENAI_API_KEY."""
    return OpenAIEngine(settings, machine, target)


class OpenAIEngine:
    """See `eagle3.engines.base.Engine`; the endpoint must serve the target itself."""

    name = "openai"
    sampling_fault = None
    batch_size = None

    def __init__(self, settings: EngineSettings, machine: MachineSettings, target: Target) -> None:
        if machine.base_url is None:
            raise Eagle3Error(
                "the endpoint has no address",
                where="machine.base_url",
                expected="http://host:port/v1",
                remedy="set it, or set engine.name to vllm to have a server started",
            )
        self.concurrency = machine.concurrency
        self._client = Client(machine.base_url, api_key(), timeout=machine.request_timeout)
        self._model = str(self._client.model(settings.model)["id"])
        self._chat = load_chat(target)
        self.versions = {"endpoint_model": self._model}

    def __enter__(self) -> OpenAIEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """The server is not ours, and connections are closed at the end of every stream."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield answers as they arrive, with rebuilt ids.

        Besides a request's own errors, `prompt_length` means that the endpoint renders the prompt differently from
        the target's template, `rebuilt_length` that the ids cannot be rebuilt.

        Raises:
            Eagle3Error: the endpoint is lost or refuses every request; a request has its own prompt ids.
        """
        if any(request.prompt_ids is not None for request in requests):
            raise Eagle3Error(
                "a chat endpoint takes messages, not token ids",
                where="engine.name",
                found="openai",
                expected="vllm or transformers",
            )
        return self._client.stream(
            partial(self._answer, sampling), requests, limit=self.concurrency, recover=self._give_up
        )

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        """Not available from an endpoint."""
        raise self._only_responses("hidden states")

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        """Not available from an endpoint."""
        raise self._only_responses("served acceptance")

    def logit_gaps(self, prefixes: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]) -> list[float]:
        """Not available from an endpoint."""
        raise self._only_responses("logits")

    async def _answer(self, sampling: Sampling, connection: AsyncOpenAI, request: GenerationRequest) -> Generation:
        try:
            prompt_ids = self._chat.render(
                request.messages, tools=request.tools, template_kwargs=request.template_kwargs
            )
            started = time.perf_counter()
            answer = await self._client.ask(connection, "/chat/completions", body_of(request, sampling, self._model))
            usage = answer.get("usage") or {}
            if usage.get("prompt_tokens") != len(prompt_ids):
                detail = f"{len(prompt_ids)} tokens, the endpoint counted {usage.get('prompt_tokens')}"
                raise RejectedError("prompt_length", detail)
            choice = answer["choices"][0]
            message = read_message(choice)
            token_ids = rebuild(
                self._chat, request, prompt_ids, message, choice["finish_reason"], usage["completion_tokens"]
            )
        except RejectedError as error:
            return failed(request, error.code, error.detail)
        return Generation(
            id=request.id,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            finish_reason=choice["finish_reason"],
            message=message,
            raw=read_raw(answer, time.perf_counter() - started),
        )

    def _give_up(self, lost: ServerLostError) -> None:
        raise Eagle3Error(
            "the endpoint was lost",
            where=self._client.url,
            found=lost,
            remedy="run again when it is back: finished answers are kept",
        )

    def _only_responses(self, what: str) -> Eagle3Error:
        return Eagle3Error(
            f"an endpoint does not provide {what}",
            where="engine.name: openai",
            remedy="set engine.name to vllm or transformers; finished responses stay in the store",
        )
