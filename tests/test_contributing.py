"""The files, folders and definitions that README.md and CONTRIBUTING.md name exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "README.md", "config/README.md", "docs/hidden-states.md", "docs/results.md")
FOLDERS = "eagle3|tests|workflow|config|docs|resources"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(rf"(?<![\w/.<>-])((?:{FOLDERS})/[\w./*-]*[\w/])(?![\w<])", text)
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert paths + links
    # A user's own files are examples.
    missing = [path for path in paths if not path.startswith("config/mine") and not (ROOT / path).exists()]
    missing += [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


def test_every_definition_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([A-Z]\w*[a-z]\w+|[A-Z]{3,}|[a-z]+_[a-z_]+)(?:\(\))?`", text))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "eagle3").rglob("*.py"))
    assert {"Config", "Engine", "Row"} <= names
    missing = [name for name in names if not re.search(rf"(?:(?:class|def) |^ *)\b{name}\b", code, re.MULTILINE)]
    assert [name for name in missing if f'"{name}"' not in code] == []


def test_the_package_is_listed_in_the_order_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [name.strip() for layer in contract["contracts"][0]["layers"] for name in layer.split("|")]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| folder | content |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`eagle3/[^|]+) \|", table, re.MULTILINE)
    listed = [path for row in rows for path in re.findall(r"`(eagle3/\w+)", row)]
    assert listed == [name.replace(".", "/") for name in layers]
