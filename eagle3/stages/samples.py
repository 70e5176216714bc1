"""Samples: raw responses in, clean token samples with spans out; what is not clean is rejected with a reason.

A sample is one generation: the prompt's ids and the generated ids, exactly as the engine saw and produced them. Its
span is the generated part. Nothing is rendered or tokenised again. Provided answers are marked `off_policy`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.chat.provided import NAME as PROVIDED
from eagle3.chat.repetition import loop_period
from eagle3.chat.template import Chat, load_chat
from eagle3.config.samples import SamplesSettings
from eagle3.console import Progress
from eagle3.errors import RejectedError
from eagle3.files.records import Record, RecordWriter, read_records, write_json
from eagle3.records import Response, Turn
from eagle3.target.pin import load_target


def make(settings: SamplesSettings, *, target: Path, responses: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Write `samples.jsonl.zst`, `rejects.jsonl.zst` and `stats.json` into `folder`.

    Args:
        settings: what counts as clean.
        target: `target.json`.
        responses: the shards of one part.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.
    """
    pinned = load_target(target)
    cleaner = _Cleaner(settings, load_chat(pinned), pinned.vocab_size)
    stats = _Stats()
    with (
        RecordWriter(folder / "samples.jsonl.zst") as samples,
        RecordWriter(folder / "rejects.jsonl.zst") as rejects,
        Progress(None, "samples", "answers") as bar,
    ):
        for response, number, turn in _turns(responses):
            bar.update(1)
            id, source = f"{response['id']}-{number}", response["source"]
            try:
                sample, reasoning = cleaner.clean(turn)
            except RejectedError as fault:
                stats.rejected(source, fault)
                rejects.write(
                    {"id": id, "source": source, "reason": fault.code, "detail": fault.detail, "record": turn}
                )
            else:
                if response["engine"].get("name") == PROVIDED:
                    sample["off_policy"] = True
                stats.accepted(source, sample, reasoning)
                samples.write({"id": id, "conversation": response["id"], "source": source, "turn": number, **sample})
    found = stats.summary()
    assert found["total"]["rows"] == samples.count + rejects.count
    write_json(folder / "stats.json", found)
    sources = {name: {"samples": part.get("samples", 0), **part["rejects"]} for name, part in found["sources"].items()}
    return {**found["total"], "supervised_share": found["supervised_share"], "by_source": sources}


def _turns(responses: Sequence[Path]) -> Iterator[tuple[Response, int, Turn]]:
    """Yield every turn of every response, with its number."""
    response: Response
    for path in responses:
        for response in read_records(path):
            yield from ((response, number, turn) for number, turn in enumerate(response["turns"]))


class _Cleaner:
    """Decides what is clean."""

    def __init__(self, settings: SamplesSettings, chat: Chat, vocab_size: int) -> None:
        self._settings = settings
        self._chat = chat
        self._vocab_size = vocab_size
        allowed = {id for id, text in chat.control.items() if text in settings.allowed_tokens}
        allowed |= chat.answer_ids - chat.stop_ids
        self._forbidden = (chat.turn_ids | chat.control.keys()) - allowed

    def clean(self, turn: Turn) -> tuple[Record, int]:
        """Return the sample's own fields and the number of reasoning tokens in it.

        Raises:
            RejectedError: with one of the codes below, or one that the responses stage gave.
        """
        if turn["error"] is not None:
            code, _, detail = turn["error"].partition(": ")
            raise RejectedError(code, detail)
        prompt, answer = turn["prompt_ids"], turn["token_ids"]
        self._check_ids(turn, prompt, answer)
        body = self._check_end(turn, answer)
        reasoning = self._check_reasoning(turn, prompt, answer)
        said = (turn["message"].get("content") or "").strip() or turn["message"].get("tool_calls")
        if turn["finish_reason"] == "stop" and not said:
            raise RejectedError("empty", "no content")
        if len(answer) < self._settings.min_generated:
            raise RejectedError("too_short", f"{len(answer)} generated tokens")
        if (period := loop_period(body, self._settings.max_repeats)) is not None:
            raise RejectedError("repetition", f"{period} tokens over and over")
        sample = {"input_ids": [*prompt, *answer], "finish_reason": turn["finish_reason"]}
        if len(sample["input_ids"]) > self._settings.max_length:
            self._cut(sample, len(prompt))
        sample["spans"] = [[len(prompt), len(sample["input_ids"])]]
        return sample, min(reasoning, len(sample["input_ids"]) - len(prompt))

    def _check_ids(self, turn: Turn, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check that the ids are in the vocabulary, and as many as the engine counted."""
        if not prompt or not answer:
            raise RejectedError("empty", f"{len(prompt)} prompt and {len(answer)} generated tokens")
        for ids in (prompt, answer):
            if min(ids) < 0 or max(ids) >= self._vocab_size:
                raise RejectedError("bad_ids", f"{min(ids)} to {max(ids)}, vocabulary of {self._vocab_size}")
        usage: Mapping[str, Any] = turn["raw"].get("usage") or {}
        for name, ids in (("prompt_tokens", prompt), ("completion_tokens", answer)):
            if usage.get(name, len(ids)) != len(ids):
                raise RejectedError("count_mismatch", f"{name}: {usage[name]} counted, {len(ids)} received")

    def _check_end(self, turn: Turn, answer: list[int]) -> list[int]:
        """Check that the answer ends as its finish reason says; return it without its end token."""
        finish = turn["finish_reason"]
        ended = answer[-1] in self._chat.stop_ids
        body = answer[:-1] if ended else answer
        if finish not in ("stop", "length", "tool_calls"):
            raise RejectedError("unfinished", f"finish reason {finish!r}")
        if finish == "length" and self._settings.truncated == "reject":
            raise RejectedError("truncated", f"{len(answer)} generated tokens")
        if finish != "length" and not ended:
            raise RejectedError("no_end_of_turn", f"last token {answer[-1]}")
        if not self._forbidden.isdisjoint(body):
            found = next(id for id in body if id in self._forbidden)
            raise RejectedError("special_token_inside", self._chat.control.get(found, str(found)))
        return body

    def _check_reasoning(self, turn: Turn, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Check that the reasoning is in the ids and closed; return its length in tokens."""
        reasoning, _ = self._chat.split_reasoning(prompt, answer)
        reported = turn["message"].get("reasoning") or ""
        if reported.strip() and not reasoning:
            raise RejectedError("reasoning_lost", "the engine returned reasoning that is not among the ids")
        if self._settings.require_reasoning and not reasoning:
            raise RejectedError("reasoning_missing")
        marks = self._chat.reasoning_ids
        if reasoning is not None and marks and turn["finish_reason"] == "stop" and marks[1] not in answer:
            raise RejectedError("reasoning_open", f"{len(reasoning)} tokens")
        return len(reasoning or ())

    def _cut(self, sample: Record, prompt_length: int) -> None:
        length, limit = len(sample["input_ids"]), self._settings.max_length
        if self._settings.too_long == "reject" or limit - prompt_length < self._settings.min_generated:
            raise RejectedError("too_long", f"{prompt_length} prompt tokens, {length} in all")
        del sample["input_ids"][limit:]
        sample["cut"] = True


class _Stats:
    """Counts per source and reason, and histograms of lengths."""

    def __init__(self) -> None:
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)
        self._rejects: dict[str, Counter[str]] = defaultdict(Counter)
        self._lengths: dict[str, Counter[int]] = {name: Counter() for name in ("prompt", "reasoning", "answer")}

    def rejected(self, source: str, fault: RejectedError) -> None:
        self._sources[source]["rows"] += 1
        self._rejects[source][fault.code] += 1

    def accepted(self, source: str, sample: Record, reasoning: int) -> None:
        [[start, end]] = sample["spans"]
        counts = self._sources[source]
        counts.update(rows=1, samples=1, tokens=end, generated=end - start, cut=int("cut" in sample))
        counts["off_policy"] += "off_policy" in sample
        counts["truncated"] += sample["finish_reason"] == "length"
        lengths = {"prompt": start, "reasoning": reasoning, "answer": end - start - reasoning}
        for name, length in lengths.items():
            # The smallest power of two that is at least the length.
            self._lengths[name][1 << max(length - 1, 0).bit_length() if length else 0] += 1

    def summary(self) -> dict[str, Any]:
        """Return all counts; every row is accounted for."""
        sources = {}
        for name, counts in sorted(self._sources.items()):
            rejects = self._rejects[name]
            assert counts["rows"] == counts["samples"] + rejects.total()
            sources[name] = {**counts, "rejects": dict(sorted(rejects.items()))}
        total = sum(self._sources.values(), Counter(rows=0, samples=0, tokens=0, generated=0))
        rejects = sum(self._rejects.values(), Counter[str]())
        return {
            "sources": sources,
            "total": {**total, "rejects": dict(sorted(rejects.items()))},
            "supervised_share": total["generated"] / total["tokens"] if total["tokens"] else 0.0,
            "lengths": {name: {str(k): v for k, v in sorted(c.items())} for name, c in self._lengths.items()},
        }
