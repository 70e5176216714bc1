"""The tables of the manual (config/README.md), generated from the settings and their docstrings.

python -m eagle3.config.manual config/README.md     # update the tables in place
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from eagle3.config.base import Settings
from eagle3.config.configuration import Config

HEADER = "| setting | default | meaning | when to change it |\n|---|---|---|---|\n"


def settings_of(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of every setting.

    Nested settings are `name.part`; a list of settings is `name` and `name[].part`; optional ones are `name` and
    `name.part`.
    """
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if _is_settings(annotation):
            yield from settings_of(annotation, f"{prefix}{name}.")
            continue
        yield prefix + name, field
        brackets = "[]" if get_origin(annotation) is list else ""
        for argument in filter(_is_settings, get_args(annotation)):
            yield from settings_of(argument, f"{prefix}{name}{brackets}.")


def table(section: str) -> str:
    """Return the table of one section of the configuration; `top-level` for the settings outside any section."""
    top_level = section == "top-level"
    rows = (
        f"| `{path if top_level else path.removeprefix(f'{section}.')}` | {_default(field)} | {meaning} | {change} |\n"
        for path, field in settings_of(Config)
        if (path.partition(".")[0] == section or (top_level and path in Config.model_fields))
        for meaning, change in [_cells(path, field)]
    )
    return HEADER + "".join(rows)


def with_tables(text: str) -> str:
    """Return the manual's text with every table between `<!-- settings: SECTION -->` and `<!-- /settings -->`
    updated.
    """
    return re.sub(
        r"(<!-- settings: ([\w-]+) -->\n).*?(<!-- /settings -->)",
        lambda found: f"{found[1]}{table(found[2])}{found[3]}",
        text,
        flags=re.DOTALL,
    )


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _cells(path: str, field: FieldInfo) -> tuple[str, str]:
    """Return the two paragraphs of a field's docstring, each on one line."""
    if not field.description:
        raise ValueError(f"the setting {path} has no docstring")
    meaning, _, change = field.description.replace("|", r"\|").partition("\n\n")
    return " ".join(meaning.split()), " ".join(change.split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = to_jsonable_python(field.get_default(call_default_factory=True))
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    manual = Path(sys.argv[1])
    manual.write_text(with_tables(manual.read_text(encoding="utf-8")), encoding="utf-8")
