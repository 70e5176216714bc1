"""Which code makes an artifact: a hash over the meaning of a stage's modules.

The fingerprint of a stage covers the modules named for it and everything they import inside `eagle3`.
It does not change when files are touched or moved to another checkout, when they are reformatted, when comments
or docstrings are edited, or when Python is upgraded (3.11 to 3.13 give the same hash). It changes with any
edit that can change behaviour.

Python's own `ast.dump`, `ast.unparse` and `tokenize` each changed their output in some release; the walk
below visits only fields that every supported release fills in the same way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "eagle3"

# Modules that decide what the user sees, never what an artifact holds.
PRESENTATION = frozenset({"eagle3.console", "eagle3.errors"})

# Fields that differ between Python releases without a difference in meaning.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_params", "type_comment", "type_ignores"})


def fingerprint(modules: Iterable[str], root: Path | None = None) -> str:
    """Return the fingerprint (64 hex digits) of `modules` and all they import inside the package.

    Args:
        modules: dotted names, e.g. `("eagle3.stages.samples",)`.
        root: the folder that holds the package; by default the one this module was loaded from.
    """
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(closure(modules, root).items()))
    return hashlib.sha256(text.encode()).hexdigest()


def closure(modules: Iterable[str], root: Path | None = None) -> dict[str, str]:
    """Return every module that `fingerprint` covers, by dotted name, with the hash of its own code."""
    root = root or Path(__file__).parents[2]
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name in PRESENTATION:
            continue
        found[name], imports = _module(_source_file(name, root))
        waiting += [imported for imported in imports if _source_file(imported, root).is_file()]
        # Importing a.b.c also runs a/__init__.py and a/b/__init__.py.
        waiting += [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
    return found


def _source_file(name: str, root: Path) -> Path:
    path = root.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _module(path: Path) -> tuple[str, frozenset[str]]:
    stat = path.stat()
    return _parse(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _parse(path: Path, _mtime_ns: int, _size: int) -> tuple[str, frozenset[str]]:
    """Return a module's own hash and the dotted names it may import from the package."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    digest = hashlib.sha256()
    _hash_node(tree, digest)
    return digest.hexdigest(), frozenset(_imports(tree))


def _hash_node(node: object, digest: hashlib._Hash) -> None:
    if isinstance(node, ast.AST):
        digest.update(f"({type(node).__name__}".encode())
        for field, value in ast.iter_fields(node):
            if field in _IGNORED_FIELDS or value is None or value == []:
                continue
            digest.update(f" {field}=".encode())
            _hash_node(value, digest)
        digest.update(b")")
    elif isinstance(node, list):
        for item in node:
            if not _is_inert(item):
                _hash_node(item, digest)
    else:
        digest.update(f"{type(node).__name__}:{node!r};".encode())


def _is_inert(node: object) -> bool:
    """Bare strings (docstrings of modules, classes, functions and fields) and type-only imports do nothing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.If) and _is_type_checking(node.test) and not node.orelse


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(tree: ast.AST) -> Iterable[str]:
    for child in ast.iter_child_nodes(tree):
        if _is_inert(child):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(child, ast.ImportFrom):
            if child.level:
                raise ValueError("relative imports are not used in this package: the fingerprint reads absolute ones")
            if child.module and child.module.split(".")[0] == PACKAGE:
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child)
