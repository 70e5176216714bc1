"""Synthetic prompts: user turns that the target writes itself, so that a run needs no data set.

The target is given only the chat template up to where a user's message begins; what it samples up to the end of the
turn is a prompt of the kind that it was tuned on (Xu et al. 2024, "Magpie", arXiv:2406.08464).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3.chat.template import Chat, load_chat
from eagle3.config.synthetic import SyntheticSettings
from eagle3.console import Progress
from eagle3.engines.base import Generation, GenerationRequest, Sampling, open_engine
from eagle3.engines.resumable import ResumableEngine
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import hash_of
from eagle3.files.records import Record, RecordLog, write_json, write_records
from eagle3.target.pin import load_target

if TYPE_CHECKING:
    from eagle3.config.engine import EngineSettings
    from eagle3.config.machine import MachineSettings

# A placeholder for a message; no template writes it, and none trims or escapes it.
_MARKER = "eagle3usermessage"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class UserTurn(NamedTuple):
    """Where a user's message is in the chat template."""

    opening: list[int]
    """Token ids up to the message."""
    closing: int
    """The control token that ends it."""


def make(
    settings: SyntheticSettings, engine: EngineSettings, machine: MachineSettings, *, target: Path, folder: Path
) -> dict[str, Any]:
    """Write `prompts.jsonl.zst`, `rejects.jsonl.zst` and `stats.json` into `folder`.

    Turns that were sampled before a kill are kept in `.turns.jsonl` and not sampled again. Repeated turns stay: the
    stage `prompts` removes duplicates across all sources.

    Args:
        settings: how many turns, and how to sample.
        engine: which engine.
        machine: where it runs.
        target: `target.json`.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: the chat template does not say where a user's turn begins and ends, the engine failed, or no
            turn is usable.
    """
    pinned = load_target(target)
    chat = load_chat(pinned)
    turn = find_user_turn(chat)
    requests = [
        GenerationRequest(
            id=f"turn-{number}",
            messages=[],
            seed=int(hash_of(settings.seed, "user turn", number)[:8], 16) >> 1,
            prompt_ids=turn.opening,
        )
        for number in range(1, settings.count + 1)
    ]
    with open_engine(engine, machine, pinned, folder) as opened, RecordLog(folder / ".turns.jsonl") as log:
        size = opened.batch_size or len(requests)
        groups = [requests[start : start + size] for start in range(0, len(requests), size)]
        sampling = Sampling(settings.max_tokens, settings.temperature, settings.top_p)
        answers = _sample(ResumableEngine(opened, log), groups, sampling)
    rows = [read_turn(chat, turn, answers[request.id]) for request in requests]
    kept = write_records(folder / "prompts.jsonl.zst", (row for row in rows if "reason" not in row))
    write_records(folder / "rejects.jsonl.zst", (row for row in rows if "reason" in row))
    rejects = dict(sorted(Counter(row["reason"] for row in rows if "reason" in row).items()))
    counts = {"turns": len(rows), "prompts": kept, "rejects": rejects}
    assert len(rows) == settings.count == kept + sum(rejects.values())
    write_json(folder / "stats.json", counts)
    if not kept:
        raise Eagle3Error(
            "the target wrote no usable user turn",
            where="`synthetic`",
            found=rejects,
            remedy="a base model, or one tuned only to answer, may not be able to write them: use another source;"
            " where turns are `truncated`, raise `synthetic.max_tokens`",
        )
    return counts


def find_user_turn(chat: Chat) -> UserTurn:
    """Find out how the chat template opens and closes a user's first message.

    Raises:
        Eagle3Error: it does not write the message as it is, or closes it with plain text.
    """
    text = chat.apply([{"role": "user", "content": _MARKER}], None, {}, generate=True)
    opening, marker, rest = text.partition(_MARKER)
    # A space before the message belongs to its first token.
    ids, after = (chat.tokenizer.encode(part, add_special_tokens=False) for part in (opening.rstrip(" "), rest))
    closing = next((index for index, id in enumerate(after) if id in chat.control), None)
    if not marker or not ids or closing is None or chat.tokenizer.decode(after[:closing]).strip():
        raise Eagle3Error(
            "the target cannot write user turns: its chat template does not mark where they end",
            where="the chat template",
            found=f"{text!r} for the message {_MARKER!r}",
            expected="the message as it is, and a control token after it",
            remedy="use another prompt source than `synthetic`",
        )
    return UserTurn(ids, after[closing])


def _sample(
    engine: ResumableEngine, groups: Sequence[Sequence[GenerationRequest]], sampling: Sampling
) -> dict[str, Generation]:
    """Return the answer to every request by its id.

    All requests are alike, so a failure points to the engine, not to the request.
    """
    answers: dict[str, Generation] = {}
    with Progress(sum(map(len, groups)), "user turns", "turns") as bar:
        for group in groups:
            for answer in engine.generate(group, sampling):
                if answer.error is not None:
                    raise Eagle3Error(
                        "a user turn could not be sampled",
                        where=answer.id,
                        found=answer.error,
                        remedy="fix the cause and run the command again: the turns so far are kept",
                    )
                answers[answer.id] = answer
                bar.update(1)
    return answers


def read_turn(chat: Chat, turn: UserTurn, answer: Generation) -> Record:
    """Return a sampled turn as a prompt, or as a reject with its reason.

    The turn ends at the first end of a user's turn or of a generation; after that the target may have gone on.
    """
    ends = chat.stop_ids | {turn.closing}
    length = next((index for index, id in enumerate(answer.token_ids) if id in ends), None)
    ids = answer.token_ids[:length]
    text = chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).strip()
    for reason, detail in _faults(chat, ids, text, complete=length is not None):
        record = {"text": text, "token_ids": answer.token_ids}
        return {"id": answer.id, "source": "synthetic", "reason": reason, "detail": detail, "record": record}
    return {"id": answer.id, "messages": [{"role": "user", "content": text}]}


def _faults(chat: Chat, ids: Sequence[int], text: str, *, complete: bool) -> Iterator[tuple[str, str]]:
    """Yield what makes a turn unusable: code and detail."""
    if found := next((chat.control[id] for id in ids if id in chat.control), None):
        yield "control_token", repr(found)
    if not complete:
        yield "truncated", f"no end within {len(ids):,} tokens"
    if not text:
        yield "empty_message", ""
    if _REPLACEMENT in text or "\0" in text:
        yield "not_text", "bytes that are not valid characters"
