"""`export`: formats to write."""

from __future__ import annotations

from eagle3.config.base import Settings


class ExportSettings(Settings):
    """Formats to write."""

    speculators: bool = False
    """Also write the speculators format (Llama-type drafts only).

    Set it to start target and draft with a single `vllm serve DRAFT`."""
