"""Which code makes an artifact: a hash over the definitions that a stage uses.

It starts at a stage's `make` and follows names, definition by definition: a definition is a function, a class or an
assignment at the top level of a module. What counts is the text of every definition reached, and which definitions
and which names of other packages it refers to. Modules do not count, nor do import lines, docstrings, comments, types
of arguments and the version of Python (3.11 to 3.13 agree): moving a definition, splitting, merging or renaming
modules, and editing an unused neighbour change nothing.

In doubt, code counts:

- a module that is used other than by `module.name` counts whole, as does one that is looked up by a string
  (`artifacts/registry.py` names those);
- statements that run at import, and definitions whose decorator may register them, count as soon as anything else of
  their module does.

`eagle3.console` and `eagle3.errors` never count: they decide how messages look. The text of a message counts, as part
of the definition that it is in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from eagle3.artifacts.definitions import AT_IMPORT, Module, Node, Reader

PACKAGE = "eagle3"
PRESENTATION = frozenset({"eagle3.console", "eagle3.errors"})


class Definition(NamedTuple):
    """What counts of one definition."""

    text: str
    """Hash of its text, in which other definitions are named without their modules."""
    uses: tuple[Node, ...]
    """The definitions it refers to, in the order of the text."""
    runs: tuple[Node, ...] = ()
    """What the imports inside it run."""


def fingerprint(roots: Iterable[str], root: Path | None = None) -> str:
    """Return the fingerprint (64 hex digits) of the code that `roots` use.

    Args:
        roots: where to start: `"eagle3.stages.samples:make"` for a definition, `"eagle3.engines.vllm.connector"` for
            everything in a module.
        root: the folder that holds the package; by default the one this module was loaded from.
    """
    return _package(root).fingerprint(tuple(sorted(set(roots))))


def closure(roots: Iterable[str], root: Path | None = None) -> dict[Node, Definition]:
    """Return every definition that `fingerprint` covers."""
    return _package(root).closure(roots)


def _split(root: str) -> tuple[str, str | None]:
    module, _, name = root.partition(":")
    return module, name or None


def _identities(definitions: Mapping[Node, Definition]) -> list[str]:
    """Return a hash for each definition that tells it from all others of the closure, without naming its module.

    A name alone does not: two modules may each have their `_read`. So each hash takes in those of the definitions it
    uses, round by round, until no round tells more of them apart.
    """
    known = {node: definition.text for node, definition in definitions.items()}
    while True:
        finer = {
            node: hashlib.sha256(" ".join([text, *(known[used] for used in uses)]).encode()).hexdigest()
            for node, (text, uses, _) in definitions.items()
        }
        if len(set(finer.values())) == len(set(known.values())):
            return list(finer.values())
        known = finer


class _Package:
    """The modules under one root, as they are now."""

    def __init__(self, files: Mapping[str, tuple[Path, int, int]]) -> None:
        self._files = files
        self._names = {name for file in files for name in _above(file)}
        self._known: dict[Node, Definition] = {}
        self._fingerprints: dict[tuple[str, ...], str] = {}

    def fingerprint(self, roots: tuple[str, ...]) -> str:
        if roots not in self._fingerprints:
            text = "\n".join(sorted(_identities(self.closure(roots))))
            self._fingerprints[roots] = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprints[roots]

    def closure(self, roots: Iterable[str]) -> dict[Node, Definition]:
        waiting = [Node(*_split(name)) for name in roots]
        found: dict[Node, Definition] = {}
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = self.definition(node)
            waiting += found[node].uses + found[node].runs
            # Importing a.b.c also runs a/__init__.py and a/b/__init__.py.
            for dotted in (node.module, *self.module(node.module).loads):
                waiting += self.run_by(dotted)
        return found

    def run_by(self, dotted: str) -> list[Node]:
        """Return what runs when a module, or a name from it, is imported."""
        modules = [name for name in _above(dotted) if name in self._names - PRESENTATION]
        return [Node(module, AT_IMPORT) for module in modules if self.module(module).runs_at_import]

    def module(self, name: str) -> Module:
        # A folder without __init__.py is an empty module.
        return _parse(*self._files[name]) if name in self._files else Module(ast.Module([], []))

    def definition(self, node: Node) -> Definition:
        if node not in self._known:
            reader = Reader(node.module, self)
            self._known[node] = Definition(reader.read(node), tuple(reader.uses), tuple(reader.runs))
        return self._known[node]

    def resolve(self, dotted: str) -> tuple[Node | str, tuple[str, ...]]:
        """Return what an absolute dotted name means, and the attributes that are left over.

        A name of this package is a `Node`; one from outside, or of a presentation module, is text.
        """
        parts = dotted.split(".")
        if parts[0] != PACKAGE:
            return dotted, ()
        for depth in range(1, len(parts) + 1):
            module, rest = ".".join(parts[:depth]), parts[depth:]
            if module in PRESENTATION:
                return ".".join(rest), ()
            if not rest or (rest[0] not in self.module(module).names and f"{module}.{rest[0]}" not in self._names):
                return Node(module, None), tuple(rest)
            imports_itself = [f"{module}.{rest[0]}"] == self.module(module).imports.get(rest[0])
            if rest[0] in self.module(module).names and not (imports_itself and f"{module}.{rest[0]}" in self._names):
                break
        found = self.module(module)
        if rest[0] in found.statements:
            return Node(module, rest[0]), tuple(rest[1:])
        return self.resolve(".".join([found.imports[rest[0]][-1], *rest[1:]]))


def _package(root: Path | None) -> _Package:
    root = root or Path(__file__).parents[2]
    paths = sorted((root / PACKAGE).rglob("*.py"))
    stats = [path.stat() for path in paths]
    return _read_package(root, tuple((p, s.st_mtime_ns, s.st_size) for p, s in zip(paths, stats, strict=True)))


@functools.lru_cache(maxsize=2)
def _read_package(root: Path, files: tuple[tuple[Path, int, int], ...]) -> _Package:
    return _Package({_dotted(file[0].relative_to(root)): file for file in files})


def _above(module: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.lru_cache(maxsize=1024)
def _parse(path: Path, _mtime_ns: int, _size: int) -> Module:
    return Module(ast.parse(path.read_bytes(), filename=str(path)))
