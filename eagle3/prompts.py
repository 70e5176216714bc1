"""Prompts: read the sources, check them, remove duplicates, and divide them into parts."""

from __future__ import annotations

from pydantic import Field

from eagle3.settings import Settings


class SourceSettings(Settings):
    """One source of prompts."""

    path: str
    """File or glob, relative to the working directory."""
    name: str | None = None
    """Name in counts and plots; by default the file's stem."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most so many, chosen by hash and therefore always the same ones."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the source to keep (below 1)."""


class PromptsSettings(Settings):
    """Where prompts come from."""

    sources: list[SourceSettings]
    parts: int = Field(default=1, ge=1)
    """Jobs that the work is divided into: one engine's lifetime each."""
    max_chars: int = Field(default=200_000, ge=1)
    """Longer conversations are rejected."""
    seed: int = 0
