"""Filter: takes the rows of a source whose columns have the wanted values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.config.prompts import Value

_SHOWN = 5


class Filter:
    """Column -> value or values. A column that a row lacks counts as null."""

    def __init__(self, where: Mapping[str, Value | list[Value]]) -> None:
        self._wanted = {column: value if isinstance(value, list) else [value] for column, value in where.items()}
        self._found: dict[str, list[str]] = {column: [] for column in where}
        self._columns: dict[str, None] = {}

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether every column has one of its wanted values."""
        for column, wanted in self._wanted.items():
            if not any(_equal(row.get(column), value) for value in wanted):
                self._note(row, column)
                return False
        return True

    def explain(self) -> str:
        """Return what the rows that were left out have instead, for an error message."""
        return "; ".join(
            f"`{column}` is {', '.join(found)}"
            if found
            else f"no row has `{column}` (there are {', '.join(self._columns)})"
            for column, found in self._found.items()
            if found or column not in self._columns
        )

    def _note(self, row: Mapping[str, Any], column: str) -> None:
        self._columns |= dict.fromkeys(row)
        found = self._found[column]
        if column in row and len(found) < _SHOWN and (value := repr(row[column])[:40]) not in found:
            found.append(value)


def _equal(found: object, wanted: Value) -> bool:
    """Compare as YAML reads: 1 and 1.0 are equal, 1 and true are not."""
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
