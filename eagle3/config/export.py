"""`export`: formats to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3.config.base import Settings

if TYPE_CHECKING:
    pass


class ExportSettings(Settings):
    """Formats to write."""

    speculators: bool = False
    """Also write the speculators format, for `vllm serve <draft>` in one step (Llama-type drafts only)."""
