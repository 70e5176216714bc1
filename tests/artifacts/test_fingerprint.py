"""The fingerprint answers one question: can this edit change what a stage makes?"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.artifacts.fingerprint import closure, fingerprint
from eagle3.artifacts.registry import STAGES, stage_fingerprint
from eagle3.engines.base import ENGINES

ROOT = Path(__file__).parents[2]

STAGE = '''"""A stage."""

from __future__ import annotations

import functools
import math as m
from typing import TYPE_CHECKING

import numpy as np

import eagle3.tools.registry
from eagle3 import other, tables
from eagle3.helper import twice
from eagle3.helper import scale as stretch
from eagle3.public import exported

if TYPE_CHECKING:
    from eagle3.types import Thing

try:
    from fast import solve
except ImportError:
    solve = None

LIMIT = 3


class Base:
    """A base."""

    kind: Kind = None

    def lower(self, limit: int) -> int:
        return min(limit, LIMIT)


class Kind:
    size = 4


def make(thing: Thing, factor: float = 1.5) -> list[str]:
    """Do it."""
    # why
    from eagle3.late import finish

    unused = [other_name for other_name in range(3)]
    LIMITS = {"limit": Base().lower(2)}
    if (found := exported(LIMITS)) and solve:
        return finish(found)
    table = getattr(tables, "first")
    return [f"{twice(factor)!r:>8} {x}" for x in (thing, None, True, b"x", 1_000, ..., np.pi, m.e, stretch(other.X))]


@functools.cache
def unrelated(x: int) -> int:
    return x + 1
'''
CLOCK = itertools.count(1)
FILES = {
    "stage": STAGE,
    "helper": "def twice(x):\n    return 2 * x\n\n\ndef scale(x, by=_BY):\n    return x\n\n\n_BY = 2\n_SPARE = 1\n",
    "types": "class Thing: ...\n",
    "other": "X = 1\nY = 2\n",
    "tables": "from eagle3.rows import first\n\nsecond = 2\n",
    "rows": "first = [1]\n",
    "public": "from eagle3.private import _exported as exported\n",
    "private": "def _exported(x):\n    return x or _read()\n\n\ndef _read():\n    return 1\n",
    "late": "from eagle3.helper2 import *\n\n\ndef finish():\n    return _read()\n\n\ndef _read():\n    return 2\n",
    "helper2": "Z = 1\n",
    "tools/__init__": "",
    "tools/registry": "from eagle3.tools.names import NAMES\n\nNAMES.append('a')\n",
    "tools/names": "NAMES = []\n",
}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"__init__": "", **files}.items():
        path = root / "eagle3" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path, FILES)


def of(package: Path, stage: str = "eagle3.stage:make") -> str:
    return fingerprint([stage], root=package)


def edit(package: Path, module: str, old: str, new: str) -> None:
    path = package / "eagle3" / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old else new + text)
    tick = next(CLOCK)
    os.utime(path, ns=(tick, tick))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("stage", "# why", "# because"),
        ("stage", '"""Do it."""', '"""Do it well."""'),
        ("stage", '"""A stage."""\n', ""),
        ("stage", "(thing, None, True,", "(\n        thing,\n        None, True,"),
        ("stage", "from eagle3.types import Thing", "from eagle3.types import Thing as Thing, Other"),
        ("stage", "thing: Thing, factor: float = 1.5", "thing: object, factor: Thing = 1.5"),
        ("stage", "def make", "def also(): ...\n\n\ndef make"),
        ("stage", "return x + 1", "return x + 2"),
        ("stage", "stretch", "wider"),
        ("stage", "import numpy as np", "import numpy"),
        ("types", "class Thing: ...", "class Thing:\n    x = 1"),
        ("other", "Y = 2", "Y = 3"),
        ("helper", "_SPARE = 1", "_SPARE = 2"),
        ("helper", "    return 2", '    "bare string"\n    return 2'),
        ("__init__", "", "import sys\n"),
    ],
)
def test_what_changes_no_behaviour_changes_no_fingerprint(package: Path, module: str, old: str, new: str) -> None:
    before = of(package)
    edit(package, module, old, new)
    if new == "import numpy":
        edit(package, module, "np.pi", "numpy.pi")
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
        ("stage", "LIMIT = 3", "LIMIT = 4"),
        ("stage", "size = 4", "size = 5"),
        ("stage", "import numpy as np", "import math as np"),
        ("stage", "import math as m", "import cmath as m"),
        ("stage", "import scale as stretch", "import twice as stretch"),
        ("stage", "from fast import solve", "from slow import solve"),
        ("stage", "solve = None", "solve = False"),
        ("stage", "@functools.cache", "@other.register"),
        ("helper", "2 * x", "x * 2"),
        ("helper", "(x):", "(x=0):"),
        ("helper", "_BY = 2", "_BY = 3"),
        ("rows", "[1]", "[2]"),
        ("tables", "second = 2", "second = 3"),
        ("tables", "second", "third"),
        ("private", "return 1", "return 3"),
        ("late", "return 2", "return 3"),
        ("helper2", "Z = 1", "Z = 2"),
        ("tools/registry", "'a'", "'b'"),
        ("tools/names", "[]", "list()"),
        ("__init__", "", "import sys\nsys.path.append('.')\n"),
        ("other", "X = 1", "X = 1\nX += 1"),
    ],
)
def test_what_can_change_behaviour_changes_the_fingerprint(package: Path, module: str, old: str, new: str) -> None:
    before = of(package)
    edit(package, module, old, new)
    assert of(package) != before


def test_names_that_a_function_binds_are_its_own(package: Path) -> None:
    """A neighbour that happens to be called like a local name is not used."""
    before = of(package)
    for name in ("thing", "unused", "other_name", "found", "table", "LIMITS", "factor", "self", "limit"):
        edit(package, "stage", "class Kind", f"{name} = 7\n\n\nclass Kind")
    assert of(package) == before


@pytest.mark.parametrize("use", ["lambda used=used: used", "[used for used in used]", "(lambda: used)()"])
def test_a_name_means_the_outer_one_where_it_is_evaluated_outside(tmp_path: Path, use: str) -> None:
    text = f"used = 1\n\n\ndef make():\n    return {use}\n"
    one = of(write(tmp_path / "one", {"stage": text}))
    assert one != of(write(tmp_path / "two", {"stage": text.replace("used = 1", "used = 2")}))


EDITS_THAT_COUNT = {
    "an item set in an unpacked assignment": ("R = {}\nX, R['a'] = 0, 1\n\n\ndef make():\n    return R\n", {}),
    "globals()": ("F = 1\n\n\ndef make():\n    return globals()['F']\n", {}),
    "sys.modules": ("import sys\n\nF = 1\n\n\ndef make():\n    return vars(sys.modules[__name__])\n", {}),
    "eval": ("F = 1\n\n\ndef make():\n    return eval('F')\n", {}),
    "a quoted field type": ("class B:\n    x = 1\n\n\nclass A:\n    b: list['B']\n\n\ndef make():\n    return A\n", {}),
    "global below a local of that name": (
        "X = 1\n\n\ndef make():\n    X = 2\n\n    def f():\n        global X\n        return X\n\n    return f() + X\n",
        {},
    ),
    "a class's import, which its methods do not see": (
        "F = 1\n\n\nclass A:\n    from abc import F\n\n    def f(self):\n        return F\n\n\ndef make(): return A\n",
        {},
    ),
    "a registration in a branch": (
        "if here:\n\n    @register\n    def f():\n        return 1\n\n\ndef make():\n    return 0\n",
        {},
    ),
    "an unused import": ("from eagle3 import side\n\n\ndef make():\n    return 0\n", {"side": "print(1)\n"}),
    "an unused import inside": ("def make():\n    import eagle3.side\n", {"side": "print(1)\n"}),
    "a package that imports its module": (
        "from eagle3.pkg import sub\n\n\ndef make():\n    return sub.X\n",
        {"pkg/__init__": "from eagle3.pkg import sub\n", "pkg/sub": "X = 1\n"},
    ),
}


@pytest.mark.parametrize("kind", EDITS_THAT_COUNT)
def test_what_is_used_indirectly_counts(tmp_path: Path, kind: str) -> None:
    stage, others = EDITS_THAT_COUNT[kind]
    files = {"stage": stage, **others}
    before = of(write(tmp_path / "before", files))
    after = {name: re.sub(r"\b1\b", "7", text) for name, text in files.items()}
    assert before != of(write(tmp_path / "after", after))


def test_a_renamed_module_is_the_same(package: Path) -> None:
    before = of(package)
    for path in (package / "eagle3").rglob("*.py"):
        path.write_text(re.sub(r"\bhelper\b", "assistance", re.sub(r"\bother\b", "further", path.read_text())))
    for old, new in (("helper", "assistance"), ("other", "further")):
        (package / f"eagle3/{old}.py").rename(package / f"eagle3/{new}.py")
    assert of(package) == before


def test_a_module_that_moves_into_a_package_is_the_same(package: Path) -> None:
    before = of(package)
    (package / "eagle3/helper.py").rename(package / "eagle3/tools/helper.py")
    edit(package, "stage", "eagle3.helper", "eagle3.tools.helper")
    assert of(package) == before


A_AND_B = {
    "stage": "from eagle3.a import f as fa\nfrom eagle3.b import f as fb\n\n\n"
    "def make(x):\n    return fa(x) - fb(x) + other(x)\n\n\ndef other(x):\n    return fb(x)\n",
    "a": "from eagle3.c import g\n\n\ndef f(x):\n    return g(x)\n",
    "b": "from eagle3.d import g\n\n\ndef f(x):\n    return g(x)\n",
    "c": "def g(x):\n    return 1\n",
    "d": "def g(x):\n    return 2\n",
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fa(x) - fb(x)", "fb(x) - fa(x)"),
        ("    return fb(x)", "    return fa(x)"),
        ("eagle3.a import f", "eagle3.b import f"),
    ],
)
def test_definitions_of_one_name_are_told_apart_by_what_they_do(tmp_path: Path, old: str, new: str) -> None:
    """Even where their own text is the same, and only what they use differs."""
    before = of(write(tmp_path, A_AND_B))
    edit(tmp_path, "stage", old, new)
    assert of(tmp_path) != before


def test_definitions_of_one_name_may_change_places(tmp_path: Path) -> None:
    before = of(write(tmp_path, A_AND_B))
    edit(tmp_path, "a", "eagle3.c", "eagle3.d")
    edit(tmp_path, "b", "eagle3.d", "eagle3.c")
    assert of(tmp_path) != before
    edit(tmp_path, "stage", "eagle3.a import f as fa", "eagle3.b import f as fa")
    assert of(tmp_path) != before
    edit(tmp_path, "stage", "eagle3.b import f as fb", "eagle3.a import f as fb")
    assert of(tmp_path) == before


PARTS: dict[str, tuple[str, Sequence[str]]] = {
    "make": ("def make(x):\n    return [first(x), Second().get()]\n", ("first", "Second")),
    "first": ("def first(x, by=SIZE):\n    return second(x) if x else first(by)\n", ("SIZE", "second")),
    "second": ("def second(x):\n    return np.array(x)\n", ()),
    "SIZE": ("SIZE = len(NAMES)\n", ("NAMES",)),
    "NAMES": ("NAMES = ['a']\nNAMES[0] = 'b'\n", ()),
    "Second": ("class Second(Third):\n    def get(self):\n        return second(self)\n", ("Third", "second")),
    "Third": ("class Third:\n    size: int = SIZE\n", ("SIZE",)),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(homes=st.lists(st.sampled_from("abc"), min_size=len(PARTS), max_size=len(PARTS)))
def test_any_division_into_modules_is_the_same(tmp_path_factory: pytest.TempPathFactory, homes: list[str]) -> None:
    def divided(homes: Sequence[str]) -> str:
        home = dict(zip(PARTS, homes, strict=True))
        files = {}
        for module in set(homes):
            inside = [name for name in PARTS if home[name] == module]
            needed = {used for name in inside for used in PARTS[name][1] if home[used] != module}
            imports = [f"from eagle3.{home[name]} import {name}\n" for name in sorted(needed)]
            files[module] = "".join(["import numpy as np\n", *imports, *(PARTS[name][0] for name in inside)])
        return of(write(tmp_path_factory.mktemp("package"), files), f"eagle3.{home['make']}:make")

    assert divided(homes) == divided("a" * len(PARTS))


def test_relative_imports_are_refused(package: Path) -> None:
    edit(package, "helper", "", "from . import other\n")
    with pytest.raises(ValueError, match="relative imports"):
        of(package)


def test_another_checkout_has_the_same_fingerprint(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package / "eagle3", elsewhere / "eagle3")
    assert of(elsewhere) == of(package)


def test_the_hash_of_known_code_is_known(package: Path) -> None:
    """On whatever Python this runs: an upgrade must not rebuild a year of artifacts."""
    assert of(package) == "fe5d7b4d78105ef55152df83d3b6db6d64926f5866b825ab974582b86856cef7"


def find_python(version: str) -> str:
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [shutil.which(f"python{version}"), *map(str, installed)]:
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"python{version} is not installed here")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_python_releases_agree(version: str, tmp_path: Path) -> None:
    """On our own sources, so that every construct we use is covered."""
    python = find_python(version)
    # The package's other modules need libraries that this Python may not have.
    for name in ("__init__", "artifacts/__init__", "artifacts/fingerprint", "artifacts/definitions"):
        write(tmp_path, {name: (ROOT / f"eagle3/{name}.py").read_text()})
    code = (
        "import pathlib, sys\n"
        "from eagle3.artifacts.fingerprint import fingerprint\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "paths = (p.relative_to(root).with_suffix('') for p in (root / 'eagle3').rglob('*.py'))\n"
        "print(fingerprint(['.'.join(p.parts).removesuffix('.__init__') for p in paths], root=root))\n"
    )
    prints = {
        subprocess.run(
            [exe, "-c", code, str(ROOT)], capture_output=True, text=True, check=True, cwd=tmp_path, env={}
        ).stdout
        for exe in (python, sys.executable)
    }
    assert len(prints) == 1


def roots(stage: str) -> list[str]:
    engines = [f"{module}:open_engine" for module in ENGINES.values()] if "engine" in STAGES[stage].sections else []
    by_string = [module for modules in STAGES[stage].engine_modules.values() for module in modules]
    return [f"{STAGES[stage].module}:make", *engines, *by_string]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sees_its_own_code_and_no_other_stage(stage: str) -> None:
    """An edit of the trainer must not cost twelve hours of responses."""
    covered = {node.module for node in closure(roots(stage))}
    assert STAGES[stage].module in covered
    assert not covered & {other.module for name, other in STAGES.items() if name != stage}
    assert not covered & {
        "eagle3.config.configuration",
        "eagle3.cli.main",
        "eagle3.artifacts.store",
        "eagle3.artifacts.job",
        "eagle3.artifacts.workflow",
        "eagle3.console",
        "eagle3.errors",
    }


def test_another_engine_does_not_count() -> None:
    assert len({stage_fingerprint("responses", {"engine": {"name": name}}) for name in ENGINES}) == len(ENGINES)
    assert len({stage_fingerprint("samples", {"engine": {"name": name}}) for name in ENGINES}) == 1


def test_every_module_that_is_named_by_a_string_is_known() -> None:
    """Names in strings are not followed: whoever adds one says in the registry whether its module counts."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "eagle3").rglob("*.py")}
    named = {
        constant.value
        for path in (ROOT / "eagle3").rglob("*.py")
        for constant in ast.walk(ast.parse(path.read_text()))
        if isinstance(constant, ast.Constant) and constant.value in modules
    }
    counted = {module for stage in STAGES.values() for modules in stage.engine_modules.values() for module in modules}
    not_counted = {"eagle3.console", "eagle3.errors", "eagle3.engines.http.supervisor"}
    assert named == counted | set(ENGINES.values()) | not_counted
