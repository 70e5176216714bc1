"""The manual explains every reason for which a row can be rejected, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def strings(node: ast.expr) -> Iterator[str]:
    """Yield what an argument can be: a text, or one of two."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from strings(body)
            yield from strings(orelse)


def codes() -> set[str]:
    """Return the codes in the package's code."""
    found: set[str] = set()
    for path in (ROOT / "eagle3").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Call(func=ast.Name(id="RejectedError"), args=[first, *_]):
                    found.update(strings(first))
                case ast.Dict(keys=[ast.Constant(value="reason"), *_], values=[first, *_]):
                    found.update(strings(first))
    return found


def synthetic_codes() -> set[str]:
    """Return the codes of user turns that the target writes."""
    tree = ast.parse((ROOT / "eagle3" / "stages" / "synthetic.py").read_bytes())
    pairs = [node.value for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    return {text for pair in pairs if isinstance(pair, ast.Tuple) for text in strings(pair.elts[0])}


def test_every_reason_is_explained() -> None:
    manual = (ROOT / "config" / "README.md").read_text(encoding="utf-8").partition("## Why rows are rejected")[2]
    explained = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", manual, flags=re.MULTILINE)
    assert sorted(explained) == sorted([*codes(), "too_long", *synthetic_codes()])
