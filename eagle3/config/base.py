"""The base of every settings class: immutable, typed, no unknown keys.

A stage's settings class stands beside the stage, so that changing one stage's settings class does not touch
the fingerprint of another. Modules that hold settings are imported whenever Snakemake reads the workflow:
they must stay light (import torch, transformers and polars inside functions).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Settings of one stage; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def outside_files(self) -> list[Path]:
        """Return the files that this section names and no stage makes; their content counts as a setting."""
        return []
