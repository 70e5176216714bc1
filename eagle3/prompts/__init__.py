"""Prompts: read the sources, check them, remove duplicates, and divide them into parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field

from eagle3.console import progress, say
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import fraction_of, hash_of, range_of
from eagle3.files.records import Record, write_json, write_records
from eagle3.files.spool import Spool
from eagle3.prompts.conversations import Conversation, Form, detect_forms, to_conversation
from eagle3.prompts.sources import RejectedError, Row, find_files, read_rows, stem
from eagle3.settings import Settings


class SourceSettings(Settings):
    """One source of prompts."""

    path: str
    """File (JSONL, also .gz or .zst, JSON, Parquet), folder or glob, relative to the working directory."""
    name: str | None = None
    """Name in counts and plots; by default the stem of each file, or the folder's name."""
    form: Form | Literal["auto"] = "auto"
    """`messages`, `sharegpt` (`from` and `value`), `prompt` (and completion), `alpaca` (`instruction` and `input`)
    or `turns` (a list of user messages); `auto` looks at the rows of each file."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most so many, chosen by hash and therefore always the same ones."""
    weight: float = Field(default=1.0, gt=0, le=1)
    """Share of the source to keep."""


class PromptsSettings(Settings):
    """Where prompts come from."""

    sources: list[SourceSettings] = Field(min_length=1)
    parts: int = Field(default=1, ge=1)
    """Jobs that the work is divided into: one engine's lifetime each."""
    max_chars: int = Field(default=200_000, ge=1)
    """Longer conversations are rejected."""
    duplicates: Literal["exact", "normalised"] = "normalised"
    """Which repeated prompts are rejected: equal ones, or also those equal but for case and blanks."""
    seed: int = 0


def make(settings: PromptsSettings, *, sources: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Write `part-{p}.jsonl.zst`, `rejects.jsonl.zst` and `stats.json` into `folder`.

    A part holds the prompts whose id falls into its range of the hash, sorted by id: a prompt more or less changes
    one part. Where prompts repeat each other, the first one in the order of the sources stays.

    Args:
        settings: the sources and what to take of them.
        sources: the files of all sources, in order, as `sources.find_files` gives them.
        folder: where to work.

    Raises:
        Eagle3Error: a source is missing, unreadable or empty, or gives no usable prompt.
    """
    files = [(source, path) for source in settings.sources for path in find_files(source.path)]
    if [path for _, path in files] != list(sources):
        raise Eagle3Error(
            "the files of the prompt sources are not those that were planned",
            found=", ".join(str(path) for _, path in files),
            expected=", ".join(map(str, sources)),
            remedy="run the command again",
        )
    reader = _Reader(settings, Spool(folder / ".spool"))
    write_records(folder / "rejects.jsonl.zst", reader.rejects())
    sizes = _write_parts(settings, folder, reader.kept())
    stats = reader.stats()
    write_json(folder / "stats.json", {**stats, "parts": sizes})
    if not sum(sizes):
        raise Eagle3Error("no prompt is left", where="prompts.sources", found=stats["total"])
    return {**stats["total"], "parts": len(sizes)}


def _write_parts(settings: PromptsSettings, folder: Path, prompts: Iterator[Record]) -> list[int]:
    """Write sorted prompts part by part; return the parts' sizes."""
    sizes = [0] * settings.parts
    for part, members in groupby(prompts, lambda prompt: range_of(prompt["id"][:8], settings.parts)):
        sizes[part] = write_records(folder / f"part-{part}.jsonl.zst", members)
    for part, size in enumerate(sizes):
        if not size:
            write_records(folder / f"part-{part}.jsonl.zst", ())
    return sizes


class _Reader:
    """Reads all sources once: good prompts go to the spool, a record of every faulty row comes out."""

    def __init__(self, settings: PromptsSettings, spool: Spool) -> None:
        self._settings = settings
        self._spool = spool
        self._first: dict[str, str] = {}
        self._ranks: dict[int, list[str]] = defaultdict(list)
        self._forms: dict[Path, Form] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._rejects: dict[str, Counter[str]] = defaultdict(Counter)

    def rejects(self) -> Iterator[Record]:
        """Read everything; yield a record for every row that cannot be used."""
        for number, source in enumerate(self._settings.sources):
            usable, fault_at = 0, None
            for path in find_files(source.path):
                name = source.name or (Path(source.path).name if Path(source.path).is_dir() else stem(path))
                with progress(None, f"reading {name}", "rows") as bar:
                    for row in read_rows(path):
                        bar.update(1)
                        self._counts[name]["rows"] += 1
                        try:
                            conversation = self._check(row, source, path)
                            usable += 1
                            self._keep(conversation, name, number)
                        except RejectedError as fault:
                            fault_at = fault_at or f"{path}, line {row.number}: {fault}"
                            yield self._reject(fault, name, path, row)
            if not usable:
                raise _useless(source, fault_at)

    def kept(self) -> Iterator[Record]:
        """Yield the prompts that remain after limits, sorted by id."""
        limits = [source.limit for source in self._settings.sources]
        # Of a limited source, those with the lowest ranks stay.
        cuts = {
            number: sorted(ranks)[limit]
            for number, ranks in self._ranks.items()
            if (limit := limits[number]) is not None and len(ranks) > limit
        }
        for _, entry in self._spool:
            prompt = entry["prompt"]
            counts = self._counts[prompt["source"]]
            cut = cuts.get(entry["number"])
            if cut is not None and hash_of(self._settings.seed, prompt["id"]) >= cut:
                counts["not taken"] += 1
                continue
            counts["prompts"] += 1
            counts["turns"] += sum(message["role"] == "user" for message in prompt["messages"])
            yield prompt

    def stats(self) -> dict[str, Any]:
        """Return counts per source and in total; every row is accounted for."""
        sources: dict[str, Any] = {}
        for name, counts in sorted(self._counts.items()):
            rejects = self._rejects[name]
            assert counts["rows"] == counts["prompts"] + counts["not taken"] + rejects.total()
            sources[name] = {**dict(sorted(counts.items())), "rejects": dict(sorted(rejects.items()))}
        total = sum(self._counts.values(), Counter[str]())
        rejects = sum(self._rejects.values(), Counter[str]())
        return {
            "sources": sources,
            "total": {**dict(sorted(total.items())), "rejects": dict(sorted(rejects.items()))},
        }

    def _check(self, row: Row, source: SourceSettings, path: Path) -> Conversation:
        if row.fault:
            raise row.fault
        if not isinstance(row.value, dict):
            raise RejectedError("wrong_form", f"the row is a {type(row.value).__name__}")
        conversation = to_conversation(row.value, self._form(row, source, path))
        if conversation.chars > self._settings.max_chars:
            raise RejectedError("too_long", f"{conversation.chars:,} characters")
        return conversation

    def _form(self, row: Row, source: SourceSettings, path: Path) -> Form:
        """Return the file's form: as set, or as its first telling row shows."""
        if source.form != "auto":
            return source.form
        if path not in self._forms:
            forms = detect_forms(row.value)
            if not forms:
                raise RejectedError("unknown_form", f"keys: {', '.join(map(str, row.value))}")
            if len(forms) > 1:
                raise Eagle3Error(
                    "a prompt source could be read in several ways",
                    where=f"{path}, line {row.number}",
                    found=", ".join(forms),
                    remedy=f"choose one: set `form: {forms[0]}` for this source under `prompts.sources`",
                )
            self._forms[path] = forms[0]
            say(f"{path}: read as `{forms[0]}`")
        return self._forms[path]

    def _keep(self, conversation: Conversation, name: str, number: int) -> None:
        """Put a conversation into the spool, unless an earlier one equals it or its source gives enough."""
        id = conversation.id
        key = id if self._settings.duplicates == "exact" else conversation.normalised_id
        if first := self._first.get(key):
            raise RejectedError("duplicate" if first == id else "duplicate_normalised", f"of {first}")
        self._first[key] = id
        rank = hash_of(self._settings.seed, id)
        if fraction_of(rank) >= self._settings.sources[number].weight:
            self._counts[name]["not taken"] += 1
            return
        if self._settings.sources[number].limit is not None:
            self._ranks[number].append(rank)
        prompt = {"id": id, "source": name, "messages": conversation.messages}
        if conversation.tools:
            prompt["tools"] = conversation.tools
        self._spool.add(id, {"number": number, "prompt": prompt})

    def _reject(self, fault: RejectedError, name: str, path: Path, row: Row) -> Record:
        self._rejects[name][fault.code] += 1
        return {
            "id": f"{path.name}:{row.number}",
            "source": name,
            "reason": fault.code,
            "detail": fault.detail,
            # Parquet has types that JSON lacks.
            "record": orjson.loads(orjson.dumps(row.value, default=str)),
        }


def _useless(source: SourceSettings, fault_at: str | None) -> Eagle3Error:
    if fault_at is None:
        return Eagle3Error("a prompt source is empty", where=source.path, expected="at least one row")
    return Eagle3Error(
        "a prompt source gives no usable prompt",
        where=source.path,
        found=fault_at,
        remedy="config/README.md lists the forms that are read; `form` under `prompts.sources` names one",
    )
