"""Reads a module's source as definitions, and a definition as its text and the names it uses.

Python's own `ast.dump`, `ast.unparse`, `tokenize` and `symtable` each changed their output in some release; the walk
below visits only fields that every supported release fills in the same way.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

AT_IMPORT = "(at import)"
"""The name under which all statements count that run when a module is imported."""

# Decorators that only wrap what they decorate; any other may register it somewhere, to be found without its name.
_WRAPPERS = ("abc.", "contextlib.", "dataclasses.", "functools.", "torch.inference_mode", "torch.no_grad", "triton.jit")
# Fields that differ between Python releases without a difference in meaning.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_params", "type_comment", "type_ignores"})
# Names through which code finds any definition of its own module.
_LOOKUPS = frozenset({"globals", "eval", "exec", "sys.modules"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_IMPORTS = (ast.Import, ast.ImportFrom)


class Node(NamedTuple):
    """A definition: `name` at the top level of `module`; None for everything in the module."""

    module: str
    name: str | None


class Package(Protocol):
    """What a reader needs to know about other modules."""

    def module(self, name: str) -> Module: ...

    def resolve(self, dotted: str) -> tuple[Node | str, tuple[str, ...]]: ...

    def run_by(self, dotted: str) -> list[Node]: ...


class Module:
    """The top level of one module.

    `statements` holds those that define a name, `imports` the dotted names that a name was imported from,
    `at_import` the other statements, which run when the module is imported; `loads` are the dotted names that it
    imports by `import a.b.c` or does not use, perhaps only for what their modules do then.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, list[str]] = {}
        self.at_import: list[ast.stmt] = []
        self.loads: list[str] = []
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for statement in tree.body:
            if _is_inert(statement):
                continue
            scope = Scope([statement])
            for name, dotted in scope.imports.items():
                self.imports.setdefault(name, []).extend(dotted)
            if isinstance(statement, _IMPORTS):
                self.loads += [alias.name for alias in statement.names if isinstance(statement, ast.Import)]
                if isinstance(statement, ast.ImportFrom):
                    self.loads += [dotted for name, dotted in _imported(statement) if name not in used]
                continue
            changed = _changed(statement) - self.imports.keys()
            for name in scope.names | scope.imports.keys() | changed:
                self.statements.setdefault(name, []).append(statement)
            if not changed and not _only_defines(statement):
                self.at_import.append(statement)
        self.names = self.statements.keys() | self.imports.keys()
        self.at_import += [s for s in tree.body if self._may_register(s)]
        self.runs_at_import = bool(self.at_import) or "*" in self.imports

    def _may_register(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.If | ast.Try | ast.TryStar) and not _is_inert(statement):
            return any(self._may_register(inner) for inner in _inner_statements(statement))
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            return False
        for decorator in statement.decorator_list:
            chain = _chain(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if chain is None:
                return True
            meanings = self.imports.get(chain[0], [f"builtins.{chain[0]}"])
            if chain[0] in self.statements or not all(_wraps(".".join([m, *chain[1:]])) for m in meanings):
                return True
        return False


class Scope:
    """The names that statements bind in the scope they run in, not counting scopes inside it."""

    def __init__(self, nodes: Iterable[ast.AST], *, is_class: bool = False) -> None:
        self.names: set[str] = set()
        self.imports: dict[str, list[str]] = {}
        self.is_class = is_class
        self.globals: set[str] = set()
        elsewhere: set[str] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self.names.add(node.name)
            elif isinstance(node, _COMPREHENSIONS):
                self.names |= {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}
            elif isinstance(node, _IMPORTS):
                for name, dotted in _imported(node):
                    self.imports.setdefault(name, []).append(dotted)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                elsewhere |= set(node.names)
                self.globals |= set(node.names) if isinstance(node, ast.Global) else set()
            elif not isinstance(node, ast.Lambda) and not _is_inert(node):
                self.names |= set(_bound(node))
                waiting += ast.iter_child_nodes(node)
        self.names -= elsewhere


class Reader:
    """Hashes definitions of one module and notes, in order, which definitions they use, and what their imports run."""

    def __init__(self, module: str, package: Package) -> None:
        self.uses: list[Node] = []
        self.runs: list[Node] = []
        self._name = module
        self._module = package.module(module)
        self._package = package
        self._digest = hashlib.sha256()
        self._follow = True
        self._types_count = False

    def read(self, node: Node) -> str:
        """Return the hash of a definition's text."""
        self._put(node.name or "(module)")
        if node.name is None:
            for name in sorted(self._module.names):
                self._use((name,), ())
        elif node.name == AT_IMPORT:
            for dotted in self._module.imports.get("*", []):
                self._mean(dotted, ())
            self._visit(self._module.at_import, ())
        else:
            for dotted in self._module.imports.get(node.name, []):
                self._mean(dotted, ())
            self._visit(self._module.statements[node.name], ())
        return self._digest.hexdigest()

    def _put(self, text: str) -> None:
        self._digest.update(text.encode() + b"\0")

    def _visit(self, node: object, scopes: tuple[Scope, ...]) -> None:
        if isinstance(node, list):
            for item in node:
                if not _is_inert(item):
                    self._visit(item, scopes)
        elif not isinstance(node, ast.AST):
            self._put(f"{type(node).__name__}:{node!r}")
        elif isinstance(node, _IMPORTS):
            names = [alias.name for alias in node.names if isinstance(node, ast.Import)]
            dotted_names = names or [dotted for _, dotted in _imported(node)]
            self.runs += [run for dotted in dotted_names for run in self._package.run_by(dotted)]
        elif (chain := _chain(node)) is not None:
            self._use(chain, scopes, stored=isinstance(getattr(node, "ctx", None), ast.Store) and len(chain) == 1)
        else:
            self._put(f"({type(node).__name__}")
            self._visit_fields(node, scopes)
            self._put(")")

    def _visit_fields(self, node: ast.AST, scopes: tuple[Scope, ...]) -> None:
        inside = scopes
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            body = node.body if isinstance(node.body, list) else [node.body]
            inside = (*scopes, Scope([node.args, *body]))
        elif isinstance(node, ast.ClassDef):
            inside = (*scopes, Scope(node.body, is_class=True))
        elif isinstance(node, _COMPREHENSIONS):
            inside = (*scopes, Scope([generator.target for generator in node.generators]))
            # Evaluated outside, where the name it is given may mean something else.
            self._visit(node.generators[0].iter, scopes)
        elif isinstance(node, ast.Try | ast.TryStar):
            self._visit_tried_imports(node)
        before = self._types_count
        if isinstance(node, _FUNCTIONS):
            self._types_count = bool(node.decorator_list)
        for field, value in ast.iter_fields(node):
            if field in _IGNORED_FIELDS or value is None or value == []:
                continue
            if field in ("annotation", "returns"):
                self._visit_annotation(node, value, scopes)
                continue
            self._put(f"{field}=")
            self._visit(value, inside if field in ("body", "elt", "key", "value", "generators") else scopes)
        self._types_count = before

    def _visit_annotation(self, node: ast.AST, value: object, scopes: tuple[Scope, ...]) -> None:
        """Types do nothing at run time, except where something reads them: in the fields of a dataclass or a pydantic
        model, which may build what they name, and below a decorator, such as Triton's `constexpr`.
        """
        is_field = isinstance(node, ast.AnnAssign) and bool(scopes) and scopes[-1].is_class
        if is_field or (self._types_count and not isinstance(node, ast.AnnAssign)):
            self._put("type=")
            follow, self._follow = self._follow, is_field
            self._visit(value, scopes)
            for part in ast.walk(value) if isinstance(value, ast.AST) else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self._visit_quoted(part.value, scopes)
            self._follow = follow

    def _visit_quoted(self, text: str, scopes: tuple[Scope, ...]) -> None:
        """A type may be quoted: `list["Item"]`. Other strings, as in `Literal["a"]`, seldom name a definition."""
        try:
            parts = list(ast.walk(ast.parse(text, mode="eval")))
        except (SyntaxError, ValueError):
            return
        for chain in filter(None, map(_chain, parts)):
            if chain[0] in self._module.names:
                self._use(chain, scopes)

    def _visit_tried_imports(self, node: ast.Try | ast.TryStar) -> None:
        """An import that may fail decides what happens next."""
        for statement in node.body:
            if isinstance(statement, _IMPORTS):
                for _, dotted in _imported(statement):
                    self._mean(dotted, ())

    def _use(self, chain: Sequence[str], scopes: tuple[Scope, ...], *, stored: bool = False) -> None:
        """Note a name, such as `a`, or `a.b.c`, by what it means here."""
        name, rest = chain[0], chain[1:]
        if stored and (not scopes or scopes[-1].is_class):
            return self._put(name)
        for scope in reversed(scopes):
            if name in scope.globals:
                break
            for dotted in scope.imports.get(name, []):
                self._mean(dotted, rest)
            # A class's imports are not visible in its methods.
            if name in scope.imports and not scope.is_class:
                return None
            if name in scope.names and not scope.is_class:
                return self._put(".".join(chain))
        if name in self._module.statements:
            self._note(Node(self._name, name), rest)
        elif name in self._module.imports:
            self._mean(self._module.imports[name][-1], rest)
        else:
            self._put(".".join(chain))
            if name in _LOOKUPS:
                self._note(Node(self._name, None), ())
        return None

    def _mean(self, dotted: str, rest: Sequence[str]) -> None:
        self._note(*self._package.resolve(".".join([dotted, *rest])))

    def _note(self, meaning: Node | str, rest: Sequence[str]) -> None:
        if isinstance(meaning, str):
            self._put(f"external {meaning}")
            if meaning in _LOOKUPS:
                self.uses.append(Node(self._name, None))
        else:
            self._put(f"use {'.'.join([meaning.name or '(module)', *rest])}")
            if self._follow:
                self.uses.append(meaning)


def _chain(node: ast.AST) -> tuple[str, ...] | None:
    """Return `a.b.c` as its names; None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def _bound(node: ast.AST) -> Iterable[str]:
    """Return the names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return [node.name]
    if isinstance(node, ast.MatchMapping) and node.rest:
        return [node.rest]
    return []


def _imported(node: ast.Import | ast.ImportFrom) -> Iterable[tuple[str, str]]:
    """Return the names that an import binds, and the dotted name that each refers to."""
    if isinstance(node, ast.ImportFrom):
        if node.module == "__future__":
            return []
        if node.level or not node.module:
            raise ValueError("relative imports are not used in this package: the fingerprint reads absolute ones")
        return [
            (alias.asname or alias.name, node.module if alias.name == "*" else f"{node.module}.{alias.name}")
            for alias in node.names
        ]
    tops = [alias.name.split(".")[0] for alias in node.names]
    return [
        (alias.asname, alias.name) if alias.asname else (top, top) for alias, top in zip(node.names, tops, strict=True)
    ]


def _is_inert(node: object) -> bool:
    """Bare strings (docstrings of modules, classes, functions and fields) and imports for type checkers do nothing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if not isinstance(node, ast.If) or node.orelse:
        return False
    chain = _chain(node.test)
    return chain is not None and chain[-1] == "TYPE_CHECKING"


def _only_defines(statement: ast.AST) -> bool:
    """Whether a top-level statement does nothing but bind names, in all its branches."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef, *_IMPORTS)) or _is_inert(statement):
        return True
    if isinstance(statement, ast.Assign):
        bound = [node for target in statement.targets for node in ast.walk(target)]
        return not any(isinstance(node, ast.Attribute | ast.Subscript) for node in bound)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name)
    if isinstance(statement, ast.If | ast.Try | ast.TryStar):
        return all(isinstance(p, ast.Pass | ast.Raise) or _only_defines(p) for p in _inner_statements(statement))
    return False


def _inner_statements(statement: ast.AST) -> list[ast.stmt]:
    """Return the statements in all branches of an `if` or a `try`."""
    parts = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return parts + [inner for handler in getattr(statement, "handlers", []) for inner in handler.body]


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names whose values a top-level statement changes: `NAME += 1`, `NAME["key"] = 1`, `NAME.key = 1`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    changed = set()
    for target in targets:
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AugAssign):
            changed.add(target.id)
    return changed


def _wraps(dotted: str) -> bool:
    return dotted.startswith(_WRAPPERS) or dotted == "builtins.property"
