"""Show records in the terminal: a sample's text, coloured by who wrote it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.pretty import pprint
from rich.text import Text

from eagle3.chat.roles import ROLES, Roles
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records
from eagle3.records import Sample
from eagle3.target.pin import load_target

STYLES = {
    "system": "magenta",
    "user": "cyan",
    "tool": "blue",
    "history": "green",
    "reasoning": "yellow",
    "answer": "green",
    "special": "red",
}
# Data must not control the terminal: control characters are shown as their pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 0xFFFD)


def show_records(file: Path, *, sample: str | None, target: Path | None, count: int) -> None:
    """Print records of a `.jsonl.zst` file, or the one with id `sample`.

    Raises:
        Eagle3Error: no record has the id, or ids are to be shown as text and no target is given.
    """
    records = list(_chosen(file, sample, count))
    if not records:
        raise Eagle3Error("no such record", where=file, found=sample, remedy="leave out --sample to see the first ids")
    console = Console()
    if "input_ids" not in records[0]:
        for record in records:
            pprint(record, console=console, max_string=400)
        return
    roles = _roles(file, target)
    console.print(legend())
    for record in records:
        supervised = sum(end - start for start, end in record["spans"])
        facts = [record["id"], record["source"], f"{len(record['input_ids'])} tokens, {supervised} trained on"]
        facts += [name.replace("_", "-") for name in ("off_policy", "cut") if record.get(name)]
        console.rule(Text("  ·  ".join(facts)))
        console.print(coloured(record, roles), soft_wrap=True)


def legend() -> Text:
    """Return the names of the roles in their colours."""
    names = [Text(role, style=_style(role, generated=role in ("reasoning", "answer"))) for role in ROLES]
    return Text("  ").join([*names, Text("trained on", style="bold underline")])


def coloured(sample: Sample, roles: Roles) -> Text:
    """Return a sample's text, coloured by role; what is trained on is bold and underlined."""
    text = Text()
    for segment in roles.segments(sample):
        text.append(segment.text.translate(_PICTURES), style=_style(segment.role, generated=segment.generated))
    return text


def _style(role: str, *, generated: bool) -> str:
    return f"bold underline {STYLES[role]}" if generated else STYLES[role]


def _chosen(file: Path, sample: str | None, count: int) -> Iterator[Any]:
    records = read_records(file)
    if sample is None:
        return itertools.islice(records, count)
    return (record for record in records if record["id"] == sample)


def _roles(file: Path, target: Path | None) -> Roles:
    from eagle3.chat.template import load_chat

    pin = target or next((f / "target/target.json" for f in file.absolute().parents if (f / "target").is_dir()), None)
    if pin is None:
        raise Eagle3Error("token ids cannot be shown as text", where=file, remedy="add --target target.json")
    return Roles(load_chat(load_target(pin)))
