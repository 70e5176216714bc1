"""Show records in the terminal: a sample's text with what the target generated in colour."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.pretty import pprint
from rich.text import Text

from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_records
from eagle3.target import load_target


def show_records(file: Path, *, sample: str | None, target: Path | None, count: int) -> None:
    """Print records of a `.jsonl.zst` file, or the one with id `sample`.

    Raises:
        Eagle3Error: no record has the id, or ids are to be shown as text and no target is given.
    """
    records = list(_chosen(file, sample, count))
    if not records:
        raise Eagle3Error("no such record", where=file, found=sample, remedy="leave out --sample to see the first ids")
    console = Console()
    tokenizer = _tokenizer(file, target) if "input_ids" in records[0] else None
    for record in records:
        if tokenizer is None:
            pprint(record, console=console, max_string=400)
            continue
        console.rule(f"{record['id']}  ·  {record['source']}  ·  {len(record['input_ids'])} tokens")
        console.print(coloured(record, tokenizer), soft_wrap=True)


def coloured(sample: Record, tokenizer: Any) -> Text:
    """Return a sample's text: the prompt dim, what the target generated green; one piece per stretch of tokens."""
    ids, text, done = sample["input_ids"], Text(), 0
    for start, end in sample["spans"]:
        text.append(tokenizer.decode(ids[done:start]), style="dim")
        text.append(tokenizer.decode(ids[start:end]), style="bold green")
        done = end
    text.append(tokenizer.decode(ids[done:]), style="dim")
    return text


def _chosen(file: Path, sample: str | None, count: int) -> Any:
    records = read_records(file)
    if sample is None:
        return itertools.islice(records, count)
    return (record for record in records if record["id"] == sample)


def _tokenizer(file: Path, target: Path | None) -> Any:
    from transformers import AutoTokenizer

    pin = target or next((f / "target/target.json" for f in file.absolute().parents if (f / "target").is_dir()), None)
    if pin is None:
        raise Eagle3Error("token ids cannot be shown as text", where=file, remedy="add --target target.json")
    found = load_target(pin)
    return AutoTokenizer.from_pretrained(found.path, trust_remote_code=found.trust_remote_code)
