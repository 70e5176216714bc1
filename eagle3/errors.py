"""The errors that a user can fix.

Every message answers four questions: where the fault is, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from pathlib import Path


class Eagle3Error(Exception):
    """A fault in the input, the configuration or an artifact; the command ends with exit code 1.

    Args:
        problem: one sentence that says what is wrong.
        where: the file, and the line, sample or key in it.
        found: what was there.
        expected: what should have been there.
        remedy: what the user can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | Path | None = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        lines = [problem]
        for label, value in (("where", where), ("found", found), ("expected", expected), ("remedy", remedy)):
            if value is not None:
                lines.append(f"  {label + ':':<10}{value}")
        super().__init__("\n".join(lines))


class RejectedError(Eagle3Error):
    """One row, request or answer cannot be used; the run continues without it.

    Args:
        code: stable, for counting; `config/README.md` explains every one.
        detail: what was found in this one.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        self.code = code
        self.detail = detail
        super().__init__(f"{code}: {detail}" if detail else code)
