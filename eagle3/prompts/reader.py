"""Reader: every row of every source becomes a prompt, or is rejected with a reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from eagle3.config.prompts import Form, PromptsSettings, SourceSettings
from eagle3.console import Progress, say
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.files.find import find_files
from eagle3.files.hashing import fraction_of, hash_of
from eagle3.files.spool import Spool
from eagle3.prompts.contamination import Contamination
from eagle3.prompts.conversations import Conversation, detect_forms, to_conversation
from eagle3.prompts.filter import Filter
from eagle3.prompts.hub import read_hub
from eagle3.prompts.sources import SourceRow, read_rows, stem
from eagle3.records import Prompt, Reject


class Origin(NamedTuple):
    """One file or data set of a source."""

    name: str
    """In counts and plots."""
    place: str
    """Its path or id, for messages."""
    rows: Iterator[SourceRow]


def origins(source: SourceSettings, synthetic: Path | None) -> Iterator[Origin]:
    """Yield the files or the data set of a source, in order.

    Args:
        source: its settings.
        synthetic: the user turns that the target wrote.
    """
    if source.hub is not None:
        name = source.name or source.hub.dataset.partition("/")[2]
        yield Origin(name, source.hub.dataset, read_hub(source.hub))
    elif source.path is None:
        assert synthetic is not None
        yield Origin(source.name or "synthetic", str(synthetic), read_rows(synthetic))
    else:
        folder = Path(source.path).name if Path(source.path).is_dir() else None
        for path in find_files(source.path):
            yield Origin(source.name or folder or stem(path), str(path), read_rows(path))


class Reader:
    """Reads all sources once: good prompts go to the spool, a record of every faulty row comes out."""

    def __init__(self, settings: PromptsSettings, synthetic: Path | None, spool: Spool) -> None:
        self._settings = settings
        self._synthetic = synthetic
        self._spool = spool
        self._contamination = Contamination(settings.decontaminate)
        self._first: dict[str, str] = {}
        self._ranks: dict[int, list[str]] = defaultdict(list)
        self._forms: dict[str, Form] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._rejects: dict[str, Counter[str]] = defaultdict(Counter)

    def rejects(self) -> Iterator[Reject]:
        """Read everything; yield a record for every row that cannot be used."""
        for number, source in enumerate(self._settings.sources):
            wanted = Filter(source.where)
            usable, fault_at = 0, None
            for origin in origins(source, self._synthetic):
                counts = self._counts[origin.name]
                with Progress(None, f"reading {origin.name}", "rows") as bar:
                    for row in origin.rows:
                        bar.update(1)
                        counts["rows"] += 1
                        try:
                            if not wanted.takes(_values(row)):
                                counts["filtered"] += 1
                                continue
                            conversation = self._check(row, source, origin.place)
                            usable += 1
                            self._keep(conversation, origin.name, number)
                        except RejectedError as fault:
                            fault_at = fault_at or f"{origin.place}, line {row.number}: {fault}"
                            yield self._reject(fault, origin, row)
            if not usable:
                raise _no_usable_prompt(source, fault_at or wanted.explain())

    def kept(self) -> Iterator[Prompt]:
        """Yield the prompts that remain after limits, sorted by id."""
        limits = [source.limit for source in self._settings.sources]
        # A limited source keeps the prompts with the lowest ranks.
        cuts = {
            number: sorted(ranks)[limit]
            for number, ranks in self._ranks.items()
            if (limit := limits[number]) is not None and len(ranks) > limit
        }
        for _, entry in self._spool:
            prompt: Prompt = entry["prompt"]
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
            kept = counts["prompts"] + counts["not taken"] + counts["filtered"]
            assert counts["rows"] == kept + rejects.total()
            sources[name] = {**dict(sorted(counts.items())), "rejects": dict(sorted(rejects.items()))}
        total = sum(self._counts.values(), Counter[str]())
        rejects = sum(self._rejects.values(), Counter[str]())
        return {
            "sources": sources,
            "total": {**dict(sorted(total.items())), "rejects": dict(sorted(rejects.items()))},
        }

    def _check(self, row: SourceRow, source: SourceSettings, place: str) -> Conversation:
        conversation = to_conversation(row.value, self._form(row, source, place), as_is=source.answers == "as_is")
        if conversation.chars > self._settings.max_chars:
            raise RejectedError("too_long", f"{conversation.chars:,} characters")
        asked = (message["content"] for message in conversation.messages if message["role"] == "user")
        if found := self._contamination.find(asked):
            raise RejectedError("contaminated", found)
        return conversation

    def _form(self, row: SourceRow, source: SourceSettings, place: str) -> Form:
        """Return the file's form: as set, or that of its first row with a known form."""
        if source.form != "auto":
            return source.form
        if place not in self._forms:
            forms = detect_forms(row.value)
            if not forms:
                raise RejectedError("unknown_form", f"keys: {', '.join(map(str, row.value))}")
            if len(forms) > 1:
                raise Eagle3Error(
                    "a prompt source could be read in several ways",
                    where=f"{place}, line {row.number}",
                    found=", ".join(forms),
                    remedy=f"choose one: set `form: {forms[0]}` for this source under `prompts.sources`",
                )
            self._forms[place] = forms[0]
            say(f"{place}: read as `{forms[0]}`")
        return self._forms[place]

    def _keep(self, conversation: Conversation, name: str, number: int) -> None:
        """Put a conversation into the spool, unless `weight` leaves it out.

        Raises:
            RejectedError: it repeats an earlier one.
        """
        id = conversation.id
        rank = hash_of(self._settings.seed, id)
        if fraction_of(rank) >= self._settings.sources[number].weight:
            # It does not count as the first of its kind: another source may take it.
            self._counts[name]["not taken"] += 1
            return
        key = id if self._settings.duplicates == "exact" else conversation.normalised_id
        if first := self._first.get(key):
            raise RejectedError("duplicate" if first == id else "duplicate_normalised", f"of {first}")
        self._first[key] = id
        if self._settings.sources[number].limit is not None:
            self._ranks[number].append(rank)
        if conversation.cut:
            self._counts[name]["cut at a tool's result"] += 1
        prompt: Prompt = {"id": id, "source": name, "messages": conversation.messages}
        if conversation.tools:
            prompt["tools"] = conversation.tools
        self._spool.add(id, {"number": number, "prompt": prompt})

    def _reject(self, fault: RejectedError, origin: Origin, row: SourceRow) -> Reject:
        self._rejects[origin.name][fault.code] += 1
        return {
            "id": f"{Path(origin.place).name}:{row.number}",
            "source": origin.name,
            "reason": fault.code,
            "detail": fault.detail,
            # Parquet has types that JSON lacks.
            "record": orjson.loads(orjson.dumps(row.value, default=str)),
        }


def _values(row: SourceRow) -> dict[str, Any]:
    """Return the row's columns.

    Raises:
        RejectedError: it has none.
    """
    if row.fault:
        raise row.fault
    if not isinstance(row.value, dict):
        raise RejectedError("wrong_form", f"the row is a {type(row.value).__name__}")
    return row.value


def _no_usable_prompt(source: SourceSettings, found: str) -> Eagle3Error:
    place = source.hub.dataset if source.hub else source.path or "synthetic"
    if not found:
        return Eagle3Error("a prompt source is empty", where=place, expected="at least one row")
    return Eagle3Error(
        "a prompt source has no usable prompt",
        where=place,
        found=found,
        remedy="config/README.md lists the forms that can be read (`form` under `prompts.sources` names one)"
        " and explains `where`",
    )
