"""The manual names every setting there is, with its true default, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from eagle3.artifacts.registry import STAGES
from eagle3.config.base import Settings
from eagle3.config.configuration import Config

MANUAL = (Path(__file__).parents[2] / "config" / "README.md").read_text(encoding="utf-8")


def section_texts() -> dict[str, str]:
    """Return section name -> its part of the manual; the top level has the empty name."""
    parts = re.split(r"^## (?=Top level|`)", MANUAL, flags=re.MULTILINE)[1:]
    return {"" if part.startswith("Top level") else part.split("`")[1]: part for part in parts}


def documented() -> dict[str, str]:
    """Return `section.setting` -> the text of its default."""
    return {
        f"{section}.{name}".lstrip("."): default
        for section, text in section_texts().items()
        for name, default in re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+) \| [^|]+ \|$", text, flags=re.MULTILINE)
    }


def settings_of(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of every setting.

    A list of settings is `name` and `name[].part`, settings that may be left out are `name` and `name.part`.
    """
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Settings):
            yield from settings_of(annotation, f"{prefix}{name}.")
            continue
        yield prefix + name, field
        brackets = "[]" if get_origin(annotation) is list else ""
        for argument in get_args(annotation):
            if isinstance(argument, type) and issubclass(argument, Settings):
                yield from settings_of(argument, f"{prefix}{name}{brackets}.")


SETTINGS = dict(settings_of(Config))


def test_the_manual_names_exactly_the_settings_there_are() -> None:
    assert sorted(documented()) == sorted(SETTINGS)


def test_sections_stand_in_the_order_of_the_data() -> None:
    sections = [name for name in Config.model_fields if any(path.startswith(f"{name}.") for path in SETTINGS)]
    assert [name for name in section_texts() if name] == sections


@pytest.mark.parametrize("path", sorted(SETTINGS))
def test_the_manual_gives_the_true_default(path: str) -> None:
    text, field = documented()[path], SETTINGS[path]
    if field.is_required():
        assert text == "required"
    else:
        default = to_jsonable_python(field.get_default(call_default_factory=True))
        assert yaml.safe_load(text.split("`")[1]) == default


@pytest.mark.parametrize("section", [name for name in section_texts() if name])
def test_the_manual_says_which_stages_rerun(section: str) -> None:
    seen = re.search(r"^Seen by: (.*?)\.", section_texts()[section], flags=re.MULTILINE)
    assert seen
    stages = [stage.name for stage in STAGES.values() if section in stage.sections]
    assert re.findall(r"`(\w+)`", seen[1]) == stages
    assert stages or seen[1] == "nothing"
