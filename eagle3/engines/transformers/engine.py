"""The embedded engine: the target in this process, on any device, through transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
import transformers

from eagle3.chat.template import load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture, Generation, GenerationRequest, Sampling, Served, failed
from eagle3.engines.dtype import compute_dtype
from eagle3.engines.transformers.batch import ATTENTION, Batch, grouped_attention, padded, tapped
from eagle3.engines.transformers.decoding import Answer, decode
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.gpus import choose_device
from eagle3.target.pin import Target

T = TypeVar("T")


def open_engine(
    settings: EngineSettings, machine: MachineSettings, target: Target, folder: Path | None = None
) -> TransformersEngine:
    """Return the embedded engine; the model is loaded at its first use."""
    return TransformersEngine(settings, machine, target)


class TransformersEngine:
    """See `eagle3.engines.base.Engine`. Batches are taken in the order given, `engine.batch_size` at a time."""

    name = "transformers"
    sampling_fault = None

    def __init__(self, settings: EngineSettings, machine: MachineSettings, target: Target) -> None:
        torch.set_num_threads(machine.threads)
        self.batch_size = settings.batch_size
        self._target = target
        self._device = choose_device(machine.device)
        self._dtype: torch.dtype = getattr(torch, compute_dtype(settings.dtype, target, self._device.type))
        self._chat = load_chat(target)
        self._loaded: Any = None
        self.versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": self._device.type,
            "dtype": str(self._dtype).removeprefix("torch."),
        }

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._loaded = None

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield an answer for every request, in order.

        Requests that cannot be answered yield an error: those that the template refuses, and
        `prompt_too_long` if the prompt fills the context.
        """
        model = self._model(self._dtype)
        for batch in _batches(requests, self.batch_size):
            prompts: dict[str, list[int]] = {}
            for request in batch:
                try:
                    prompts[request.id] = self._prompt(request)
                except RejectedError as error:
                    yield failed(request, error.code, error.detail)
            accepted = [request for request in batch if request.id in prompts]
            if accepted:
                rows = [prompts[request.id] for request in accepted]
                limits = [self._limit(row, sampling) for row in rows]
                seeds = [request.seed for request in accepted]
                answers = decode(model, rows, limits, self._chat.stop_ids, sampling, seeds)
                for request, row, answer in zip(accepted, rows, answers, strict=True):
                    yield self._generation(request, row, answer)

    @torch.no_grad()
    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        """Yield the states [n, L, H] of every sequence, on the CPU and in the engine's dtype, in order."""
        model = self._model(self._dtype)
        with tapped(model, layer_ids) as states:
            for batch in _batches(sequences, self.batch_size):
                # Causal attention, padded on the right: no real token can see the padding.
                output = model.get_decoder()(padded(batch).to(self._device), use_cache=False)
                lengths = [len(sequence) for sequence in batch]
                last = output.last_hidden_state[range(len(batch)), [length - 1 for length in lengths]]
                following = model.get_output_embeddings()(last).float().argmax(-1).tolist()
                stacked = torch.stack(states, dim=2).cpu()
                for row, (sequence, next_token) in enumerate(zip(batch, following, strict=True)):
                    yield Capture(list(sequence), stacked[row, : len(sequence)].clone(), next_token)

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        """Answer every request, in float32 so that both modes round alike; see `Engine.serve`."""
        # Imported by name, so that an edit of serving does not count for artifacts of generation and capture.
        speculation = importlib.import_module("eagle3.engines.transformers.speculation")
        model = self._model(torch.float32)
        self.versions["serving_dtype"] = "float32"
        drafter = None if draft is None else speculation.load_draft(draft, model)
        answers: dict[str, Answer] = {}
        durations: dict[str, float] = {}
        prompts = [self._prompt(request) for request in requests]
        stop_ids = self._chat.stop_ids
        started = perf_counter()
        for batch in _batches(list(zip(requests, prompts, strict=True)), self.batch_size):
            rows = [prompt for _, prompt in batch]
            limits = [self._limit(row, sampling) for row in rows]
            seeds = [request.seed for request, _ in batch]
            begun = perf_counter()
            if drafter is None:
                served = decode(model, rows, limits, stop_ids, sampling, seeds)
            else:
                served = speculation.speculate(model, drafter, rows, limits, stop_ids, k, sampling, seeds)
            durations |= {request.id: perf_counter() - begun for request, _ in batch}
            answers |= {request.id: answer for (request, _), answer in zip(batch, served, strict=True)}
        return Served(
            token_ids={name: answer.token_ids for name, answer in answers.items()},
            steps={name: answer.steps for name, answer in answers.items()},
            accepted={name: answer.accepted or [0] * k for name, answer in answers.items()},
            seconds=perf_counter() - started,
            durations=durations,
        )

    @torch.no_grad()
    def logit_gaps(self, prefixes: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]) -> list[float]:
        """See `Engine.logit_gaps`; computed in float32, as in serving."""
        model = self._model(torch.float32)
        gaps = []
        for prefix, (first, second) in zip(prefixes, pairs, strict=True):
            logits = Batch(model).prefill([prefix])[0]
            gaps.append(float(logits[first] - logits[second]))
        return gaps

    def _prompt(self, request: GenerationRequest) -> list[int]:
        """Return the prompt ids.

        Raises:
            RejectedError: the template refuses the messages, or the prompt fills the context.
        """
        prompt = request.prompt_ids or self._chat.render(
            request.messages, tools=request.tools, template_kwargs=request.template_kwargs
        )
        context = self._target.config.get("max_position_embeddings")
        if context is not None and len(prompt) >= context:
            raise RejectedError("prompt_too_long", f"{len(prompt)} tokens, the target's context has {context}")
        return prompt

    def _limit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        context = self._target.config.get("max_position_embeddings")
        return sampling.max_tokens if context is None else min(sampling.max_tokens, context - len(prompt))

    def _generation(self, request: GenerationRequest, prompt: list[int], answer: Answer) -> Generation:
        stopped = answer.token_ids[-1] in self._chat.stop_ids
        return Generation(
            id=request.id,
            prompt_ids=prompt,
            token_ids=answer.token_ids,
            finish_reason="stop" if stopped else "length",
            message=self._chat.parse(prompt, answer.token_ids),
        )

    def _model(self, dtype: torch.dtype) -> Any:
        """Return the model in `dtype`; one is kept at a time."""
        if self._loaded is None or self._loaded.dtype != dtype:
            self._loaded = None
            self._loaded = load_model(self._target, dtype).to(self._device)
        return self._loaded


def load_model(target: Target, dtype: torch.dtype) -> Any:
    """Load the target for inference on the CPU, from safetensors only.

    Raises:
        Eagle3Error: transformers does not support the model, or not every layer has full attention.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION, grouped_attention)
    # cuDNN's attention is planned again for each length of the cache: 114 ms a token on an H200, without it 0.2 ms.
    torch.backends.cuda.enable_cudnn_sdp(False)
    options = {"trust_remote_code": target.trust_remote_code, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(target.path, **options)
        _require_full_attention(config.get_text_config(), target)
        text_only = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or target.trust_remote_code
        kind = transformers.AutoModelForCausalLM if text_only else transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(
            target.path, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True, **options
        )
    except (ImportError, KeyError, OSError, ValueError) as error:
        raise Eagle3Error(
            "the embedded engine cannot load the target",
            where=target.path,
            found=str(error).strip().splitlines()[0],
            remedy="set engine.name to vllm, or use a model that transformers supports",
        ) from error
    return model.eval()


def _require_full_attention(config: Any, target: Target) -> None:
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if window := getattr(config, "sliding_window", None):
        kinds.add(f"a sliding window of {window}")
    if kinds:
        raise Eagle3Error(
            "the embedded engine only runs models with full attention in every layer",
            where=target.path / "config.json",
            found=", ".join(sorted(kinds)),
            remedy="set engine.name to vllm",
        )


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
