"""Export: the draft in the formats that vLLM and SGLang load."""

from __future__ import annotations

from eagle3.settings import Settings


class ExportSettings(Settings):
    """Formats to write."""

    speculators: bool = False
    """Also write the speculators format, for `vllm serve <draft>` in one step (Llama-type drafts only)."""
