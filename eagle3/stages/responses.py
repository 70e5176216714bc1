"""Responses: prompts in, the target's answers to them out, turn by turn, as raw, token-exact records.

Turns go in *waves*: wave t sends the t-th turn of every conversation, so that later turns see the target's own
earlier answers. If an engine's rounding depends on the batch, a wave is cut into fixed groups.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eagle3.chat.provided import has_answers, provided_responses
from eagle3.chat.template import Chat, load_chat
from eagle3.config.responses import ResponsesSettings
from eagle3.console import Progress
from eagle3.engines.base import Engine, Generation, GenerationRequest, Sampling, failed, open_engine
from eagle3.engines.resumable import ResumableEngine
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.files.hashing import hash_of, range_of
from eagle3.files.records import RecordLog, read_records, write_records
from eagle3.records import Message, Prompt, Response, Turn
from eagle3.target.pin import Target, load_target

if TYPE_CHECKING:
    from eagle3.config.engine import EngineSettings
    from eagle3.config.machine import MachineSettings

_QUOTED_ERRORS = 3


def make(
    settings: ResponsesSettings,
    engine: EngineSettings,
    machine: MachineSettings,
    *,
    target: Path,
    prompts: Path,
    folder: Path,
) -> dict[str, Any]:
    """Write `shard-{i}.jsonl.zst` into `folder`: one record per conversation, sorted by id.

    Answers that were generated before a kill are kept in `.turns.jsonl` and not generated again.

    Args:
        settings: how to sample, and how many shards.
        engine: which engine.
        machine: where it runs.
        target: `target.json`.
        prompts: one part of the prompts.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: too many requests failed (the first errors are quoted), or the target cannot be used.
    """
    pinned = load_target(target)
    shards: list[list[Prompt]] = [[] for _ in range(settings.shards)]
    for prompt in read_records(prompts):
        # The first digits of the id chose the part.
        shards[range_of(prompt["id"][8:], settings.shards)].append(prompt)
    paths = [folder / f"shard-{number}.jsonl.zst" for number in range(settings.shards)]
    missing = [number for number, path in enumerate(paths) if not _is_complete(path, shards[number])]
    if missing:
        chat = load_chat(pinned)
        asked = [[_Conversation(prompt) for prompt in shards[number] if not has_answers(prompt)] for number in missing]
        identity: dict[str, str] = {}
        if any(asked):
            responder = _Responder(settings, pinned, chat, asked)
            with open_engine(engine, machine, pinned, folder) as opened, RecordLog(folder / ".turns.jsonl") as log:
                responder.answer(opened, log)
                identity = {"name": opened.name, **opened.versions}
        for number, conversations in zip(missing, asked, strict=True):
            answered = (conversation.record(identity) for conversation in conversations)
            held = [*filter(has_answers, shards[number])]
            provided = provided_responses(chat, held, settings.template_kwargs) if held else ()
            write_records(paths[number], heapq.merge(answered, provided, key=itemgetter("id")))
    return _counts(paths)


def _is_complete(path: Path, prompts: Sequence[Prompt]) -> bool:
    """Whether an earlier attempt finished this shard."""
    with suppress(Eagle3Error):
        if path.is_file():
            return [record["id"] for record in read_records(path)] == [prompt["id"] for prompt in prompts]
    return False


class _Conversation:
    """One prompt, and the turns that the target has answered so far."""

    def __init__(self, prompt: Prompt) -> None:
        self.id: str = prompt["id"]
        self._source: str = prompt["source"]
        self._tools: list[dict[str, Any]] | None = prompt.get("tools")
        self._waiting: list[Message] = list(prompt["messages"])
        self._history: list[Message] = []
        self._turns: list[Turn] = []

    @property
    def turns_left(self) -> int:
        return sum(message["role"] == "user" for message in self._waiting)

    def ask(self, settings: ResponsesSettings) -> GenerationRequest:
        """Return the request for the next turn."""
        while not self._history or self._history[-1]["role"] != "user":
            self._history.append(self._waiting.pop(0))
        turn = len(self._turns)
        return GenerationRequest(
            id=f"{self.id}-{turn}",
            messages=list(self._history),
            seed=int(hash_of(settings.seed, self.id, turn)[:8], 16) >> 1,
            tools=self._tools,
            template_kwargs=settings.template_kwargs,
        )

    def add_answer(self, request: GenerationRequest, sampling: Sampling, answer: Generation) -> None:
        """Record the answer to a turn; an error ends the conversation."""
        asked = {
            "messages": request.messages,
            "sampling": asdict(sampling),
            "template_kwargs": request.template_kwargs,
            "seed": request.seed,
            "tools": request.tools,
        }
        self._turns.append(
            {
                "request": asked,
                "prompt_ids": answer.prompt_ids,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "message": answer.message,
                "raw": answer.raw,
                "error": answer.error,
            }
        )
        self._history.append(answer.message)
        if answer.error is not None:
            self._waiting.clear()

    def record(self, engine: dict[str, str]) -> Response:
        return {"id": self.id, "source": self._source, "engine": engine, "turns": self._turns}


Wave = list[tuple[_Conversation, GenerationRequest]]


class _Responder:
    """Has the target answer the conversations of one part."""

    def __init__(
        self, settings: ResponsesSettings, target: Target, chat: Chat, shards: Sequence[Sequence[_Conversation]]
    ) -> None:
        self.shards = shards
        self._settings = settings
        self._sampling = Sampling(settings.max_tokens, settings.temperature, settings.top_p)
        self._chat = chat
        self._context: int | None = target.config.get("max_position_embeddings")
        conversations = sum(map(len, shards))
        share = settings.max_error_share
        self._errors_allowed = max(1, int(share * conversations)) if share else 0
        self._errors: list[str] = []
        self._kinds: Counter[str] = Counter()

    def answer(self, engine: Engine, log: RecordLog) -> None:
        """Answer every turn, wave by wave; answers in the log are not computed again."""
        resumable = ResumableEngine(engine, log)
        total = sum(conversation.turns_left for shard in self.shards for conversation in shard)
        tokens, started = 0, perf_counter()
        with Progress(total, "responses", "answers") as bar:
            while any(conversation.turns_left for shard in self.shards for conversation in shard):
                for group in self._wave(engine.batch_size):
                    asked = {request.id: (conversation, request) for conversation, request in group}
                    for answer in resumable.generate([request for _, request in group], self._sampling):
                        conversation, request = asked[answer.id]
                        conversation.add_answer(request, self._sampling, answer)
                        self._check(answer)
                        tokens += len(answer.token_ids)
                        bar.update(1, self._state(tokens, perf_counter() - started))

    def _wave(self, size: int | None) -> list[Wave]:
        """Return the next turn of every conversation, in groups that are computed together, short prompts first.

        A group never spans two shards, so a shard that has to be rebuilt comes out the same.
        """
        groups: list[Wave] = []
        everything: Wave = []
        for shard in self.shards:
            lengths = {}
            wave: Wave = []
            for conversation in shard:
                if conversation.turns_left:
                    request = conversation.ask(self._settings)
                    if (length := self._prompt_length(conversation, request)) is not None:
                        lengths[request.id] = length
                        wave.append((conversation, request))
            wave.sort(key=lambda entry: (lengths[entry[1].id], entry[1].id))
            if size is None:
                everything += wave
            else:
                groups += [wave[start : start + size] for start in range(0, len(wave), size)]
        return [everything] if size is None else groups

    def _prompt_length(self, conversation: _Conversation, request: GenerationRequest) -> int | None:
        """Return the prompt's length in tokens; None if it cannot be sent, and then record the error as the answer."""
        try:
            ids = self._chat.render(request.messages, tools=request.tools, template_kwargs=request.template_kwargs)
            if self._context is not None and len(ids) + self._settings.max_tokens > self._context:
                detail = f"{len(ids):,} tokens and {self._settings.max_tokens:,} to generate"
                raise RejectedError("prompt_too_long", f"{detail}, the target takes {self._context:,}")
        except RejectedError as error:
            answer = failed(request, error.code, error.detail)
            conversation.add_answer(request, self._sampling, answer)
            # Text that a user wrote does not point to a wrong setting; every other error may.
            if error.code != "special_token_in_text":
                self._check(answer)
            return None
        return len(ids)

    def _state(self, tokens: int, seconds: float) -> str:
        """Return the rest of the progress line: tokens per second, errors by kind."""
        kinds = (f"{count} {kind}" for kind, count in sorted(self._kinds.items()))
        return ", ".join([f"{tokens / seconds:,.0f} tokens/s", *kinds])

    def _check(self, answer: Generation) -> None:
        """Give up as soon as too many conversations have failed."""
        if answer.error is None:
            return
        self._errors.append(f"{answer.id}: {answer.error}")
        self._kinds[_kind(answer.error)] += 1
        if len(self._errors) > self._errors_allowed:
            raise Eagle3Error(
                "too many requests failed",
                found="\n            ".join(self._errors[:_QUOTED_ERRORS]),
                expected=f"at most {self._errors_allowed:,} (`responses.max_error_share`)",
                remedy="fix the cause and run the command again: the good answers are kept",
            )


def _counts(paths: Sequence[Path]) -> dict[str, Any]:
    counts: Counter[str] = Counter(conversations=0, answers=0)
    reasons: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    rebuilt: Counter[str] = Counter()
    for path in paths:
        for record in read_records(path):
            counts["conversations"] += 1
            for turn in record["turns"]:
                if turn["error"] is not None:
                    errors[_kind(turn["error"])] += 1
                    continue
                counts["answers"] += 1
                counts["prompt_tokens"] += len(turn["prompt_ids"])
                counts["generated_tokens"] += len(turn["token_ids"])
                reasons[turn["finish_reason"]] += 1
                if "rebuilt" in turn["raw"]:
                    rebuilt[turn["raw"]["rebuilt"]] += 1
    kinds = {"finished_by": reasons, "ids_rebuilt_from_the_text": rebuilt, "errors": errors}
    return {**counts, **{name: dict(sorted(found.items())) for name, found in kinds.items()}}


def _kind(error: str) -> str:
    return error.partition(":")[0]
