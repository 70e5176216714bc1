"""`target`: which model is served faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3.config.base import Settings

if TYPE_CHECKING:
    pass


class TargetSettings(Settings):
    """Which model is to be served faster."""

    model: str = "smollm2-135m-instruct"
    """`smollm2-135m-instruct` (the demo, made from a pinned PyPI wheel), a local folder, or a hub id."""
    revision: str | None = None
    """Revision of a hub id: a commit, for a run that can be repeated."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
