"""Rows of prompt sources, and what the stage `prompts` makes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from eagle3.config.prompts import PromptsSettings
from eagle3.files.records import Record, read_records
from eagle3.stages import prompts


def lines(*rows: object) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(lines(*rows))
    return path


def run(folder: Path, *sources: Any, **values: Any) -> dict[str, Any]:
    """Make prompts from paths or source settings."""
    entries = [source if isinstance(source, dict) else {"path": str(source)} for source in sources]
    chosen = PromptsSettings.model_validate({"sources": entries, **values})
    folder.mkdir(exist_ok=True, parents=True)
    return prompts.make(chosen, sources=chosen.outside_files(), folder=folder)


def parts(folder: Path) -> list[Record]:
    return [record for path in sorted(folder.glob("part-*")) for record in read_records(path)]


def rejected(folder: Path) -> list[tuple[str, str]]:
    return [(record["id"], record["reason"]) for record in read_records(folder / "rejects.jsonl.zst")]


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


ASK = user("What is a prime number?")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def many(path: Path, texts: Sequence[str]) -> Path:
    return write(path, *({"turns": [text]} for text in texts))


def part_bytes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("part-*"))]
