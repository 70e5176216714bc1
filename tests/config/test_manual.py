"""The manual names every setting there is, with its true default, and its tables are those of the docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic_core import to_jsonable_python

from eagle3.artifacts.registry import STAGES
from eagle3.config.configuration import Config
from eagle3.config.manual import settings_of, with_tables

MANUAL = (Path(__file__).parents[2] / "config" / "README.md").read_text(encoding="utf-8")
CELL = r"((?:[^|\\]|\\.)*)"


def section_texts() -> dict[str, str]:
    """Return section name -> its part of the manual; the top level has the empty name."""
    parts = re.split(r"^## (?=Top level|`)", MANUAL, flags=re.MULTILINE)[1:]
    return {"" if part.startswith("Top level") else part.split("`")[1]: part for part in parts}


def documented() -> dict[str, tuple[str, str]]:
    """Return `section.setting` -> the texts of its default and its meaning."""
    return {
        f"{section}.{name}".lstrip("."): (default, meaning.strip())
        for section, text in section_texts().items()
        for name, default, meaning, _ in re.findall(
            rf"^\| `([\w.\[\]]+)` \|{CELL}\|{CELL}\|{CELL}\|$", text, flags=re.MULTILINE
        )
    }


SETTINGS = dict(settings_of(Config))


def test_the_tables_are_those_of_the_docstrings() -> None:
    assert MANUAL == with_tables(MANUAL), "run `python -m eagle3.config.manual config/README.md`"


def test_the_manual_names_exactly_the_settings_there_are() -> None:
    assert sorted(documented()) == sorted(SETTINGS)


def test_the_manual_says_what_every_setting_means() -> None:
    assert [path for path, (_, meaning) in documented().items() if not meaning] == []


def test_sections_are_in_the_order_of_the_data() -> None:
    sections = [name for name in Config.model_fields if any(path.startswith(f"{name}.") for path in SETTINGS)]
    assert [name for name in section_texts() if name] == sections


@pytest.mark.parametrize("path", sorted(SETTINGS))
def test_the_manual_gives_the_true_default(path: str) -> None:
    (text, _), field = documented()[path], SETTINGS[path]
    if field.is_required():
        assert text.strip() == "required"
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
