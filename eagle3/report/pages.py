"""The pages of the report: tables of figures, and samples whose text is coloured by who wrote it."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.chat.roles import ROLES, Roles
from eagle3.files.records import in_turn, read_records
from eagle3.records import Sample

Rows = Mapping[str, Any]

# Samples to show are picked from this many at the start of the training data, which is shuffled.
_CANDIDATES = 2000
_SHOWN = 10
# Longer texts are shortened in the middle.
_CHARS = 3000

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 sans-serif; margin: 1.5em; color: #222 }}
table {{ border-collapse: collapse; margin-bottom: 1.5em }}
caption {{ text-align: left; font-weight: bold; padding: .3em 0 }}
td:first-child, th {{ white-space: nowrap }}
th {{ text-align: right; font-weight: normal; color: #555; padding: .25em 0 .25em 1.5em }}
td {{ border-top: 1px solid #ddd; padding: .25em 1.5em .25em 0 }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; padding: .25em 0 .25em 1.5em }}
h2 {{ font-size: 1em; margin: 1.5em 0 .3em }}
pre {{ font: 13px/1.5 monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .6em;
  border: 1px solid #ddd }}
.generated {{ background: #fff3d6 }}
.system {{ color: #882255 }}
.user {{ color: #0072b2 }}
.tool {{ color: #5b3f99 }}
.history {{ color: #00694e }}
.reasoning {{ color: #9a4600 }}
.answer {{ color: #00694e; font-weight: bold }}
.special {{ color: #888; font-size: 85% }}
.cut {{ color: #222; font-style: italic }}
</style>
{body}
</html>
"""


def write(path: Path, title: str, *parts: str) -> None:
    """Write a page; it is self-contained, without scripts, links or images."""
    path.write_text(_PAGE.format(title=title, body="\n".join(part for part in parts if part)), encoding="utf-8")


def table(title: str, rows: Rows) -> str:
    """Return a table of names and values; what is None is left out."""
    return grid(title, (), [(name, value) for name, value in rows.items() if value is not None])


def grid(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; each row begins with its name, and a value of None leaves its cell empty."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    cells = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    top = f"<tr><th></th>{head}</tr>\n" if headings else ""
    return f"<table>\n<caption>{html.escape(title)}</caption>\n{top}{cells}\n</table>"


def samples(train: Path, roles: Roles) -> Iterator[str]:
    """Yield a legend and ten training samples, of every source in turn."""
    names = (f'<span class="{role}">{role}</span>' for role in ROLES)
    yield f'<p>Written by: {", ".join(names)}. <span class="generated">Trained on</span>. {_MEANING}</p>'
    for sample in _pick(train):
        tokens, trained = len(sample["input_ids"]), sum(end - start for start, end in sample["spans"])
        facts = [sample["source"], f"{tokens:,} tokens, {trained:,} trained on"]
        facts += [name.replace("_", "-") for name in ("off_policy", "cut") if sample.get(name)]
        text = "".join(_segment(*segment[:3]) for segment in roles.segments(sample))
        yield f"<h2>{html.escape(' · '.join([sample['id'], *facts]))}</h2>\n<pre>{text}</pre>"


_MEANING = "History means earlier answers, special means control tokens."


def _pick(train: Path) -> list[Sample]:
    """Return a few samples, source by source in turn, in the order of the file."""
    waiting: dict[str, list[Sample]] = defaultdict(list)
    for record in islice(read_records(train), _CANDIDATES):
        if len(waiting[record["source"]]) < _SHOWN:
            waiting[record["source"]].append(record)
    return list(islice(in_turn([found for _, found in sorted(waiting.items())]), _SHOWN))


def _segment(role: str, generated: bool, text: str) -> str:
    classes = f"{role} generated" if generated else role
    if len(text) > _CHARS:
        half = _CHARS // 2
        left_out = f'<span class="cut"> [… {len(text) - 2 * half:,} characters …] </span>'
        text = html.escape(text[:half]) + left_out + html.escape(text[-half:])
    else:
        text = html.escape(text)
    return f'<span class="{classes}">{text}</span>'


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
