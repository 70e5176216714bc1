"""The fingerprint answers one question: can this edit change what a stage makes?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.artifacts.fingerprint import closure, fingerprint
from eagle3.artifacts.registry import STAGES

ROOT = Path(__file__).parents[2]

MODULE = '''"""A stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3.helper import twice

if TYPE_CHECKING:
    from eagle3.types import Thing


def make(thing: Thing, factor: float = 1.5) -> list[str]:
    """Do it."""
    # why
    return [f"{twice(factor)!r:>8} {x}" for x in (thing, None, True, b"x", 1_000, ...)]
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {
        "__init__": "",
        "stage": MODULE,
        "helper": "def twice(x):\n    return 2 * x\n",
        "types": "class Thing: ...\n",
        "other": "X = 1\n",
    }
    (tmp_path / "eagle3").mkdir()
    for name, text in files.items():
        (tmp_path / "eagle3" / f"{name}.py").write_text(text)
    return tmp_path


def of(package: Path) -> str:
    return fingerprint(["eagle3.stage"], root=package)


def edit(package: Path, module: str, old: str, new: str) -> None:
    path = package / "eagle3" / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("stage", "# why", "# because"),
        ("stage", '"""Do it."""', '"""Do it well."""'),
        ("stage", '"""A stage."""\n', ""),
        ("stage", "(thing, None, True,", "(\n        thing,\n        None, True,"),
        ("stage", "from eagle3.types import Thing", "from eagle3.types import Thing as Thing, Other"),
        ("types", "class Thing: ...", "class Thing:\n    x = 1"),
        ("other", "X = 1", "X = 2"),
        ("helper", "    return", '    "bare string"\n    return'),
    ],
)
def test_what_changes_no_behaviour_changes_no_fingerprint(package: Path, module: str, old: str, new: str) -> None:
    before = of(package)
    edit(package, module, old, new)
    assert of(package) == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("stage", "1.5", "1.6"),
        ("stage", "twice(factor)", "factor"),
        ("stage", "!r", ""),
        ("stage", ":>8", ":>9"),
        ("stage", "None, True", "True, None"),
        ("stage", 'b"x"', '"x"'),
        ("helper", "2 * x", "x * 2"),
        ("helper", "(x):", "(x=0):"),
        ("__init__", "", "import sys\n"),
    ],
)
def test_what_can_change_behaviour_changes_the_fingerprint(package: Path, module: str, old: str, new: str) -> None:
    before = of(package)
    edit(package, module, old, new)
    assert of(package) != before


def test_imports_inside_functions_count(package: Path) -> None:
    edit(package, "helper", "    return 2", "    import eagle3.other\n    return 2")
    before = of(package)
    edit(package, "other", "X = 1", "X = 2")
    assert of(package) != before


def test_another_checkout_has_the_same_fingerprint(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package / "eagle3", elsewhere / "eagle3")
    assert of(elsewhere) == of(package)


def test_the_hash_of_known_code_is_known(package: Path) -> None:
    """On whatever Python this runs: an upgrade must not make a year of artifacts anew."""
    assert of(package) == "853fc26da3791ef63da4edcdcfa3b5776ba3d8d2d0a578ef739634e54a9a28ce"


def find_python(version: str) -> str:
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [shutil.which(f"python{version}"), *map(str, installed)]:
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"python{version} is not installed here")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_python_releases_agree(version: str) -> None:
    """On our own sources, so that every construct we use is covered."""
    python = find_python(version)
    code = (
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('f', 'eagle3/artifacts/fingerprint.py')\n"
        "f = importlib.util.module_from_spec(spec); sys.modules['f'] = f; spec.loader.exec_module(f)\n"
        "names = sorted('.'.join(p.with_suffix('').parts) for p in pathlib.Path('eagle3').rglob('*.py'))\n"
        "print(f.fingerprint(n.removesuffix('.__init__') for n in names))\n"
    )
    prints = {
        subprocess.run([exe, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for exe in (python, sys.executable)
    }
    assert len(prints) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sees_its_own_code_and_no_other_stage(stage: str) -> None:
    """An edit of the trainer must not cost twelve hours of responses."""
    covered = set(closure(STAGES[stage].modules))
    assert set(STAGES[stage].modules) <= covered
    allowed = {"acceptance_simulated": {"draft"}}.get(stage, set())
    others = {
        module for name, other in STAGES.items() if name != stage and name not in allowed for module in other.modules
    } - set(STAGES[stage].modules)
    assert not covered & others
    assert not covered & {
        "eagle3.config.configuration",
        "eagle3.cli.main",
        "eagle3.artifacts.store",
        "eagle3.artifacts.job",
        "eagle3.artifacts.workflow",
    }
