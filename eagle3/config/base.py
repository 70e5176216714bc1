"""The base of every settings class: immutable, typed, no unknown keys.

Each section has a module of its own, so that changing one stage's settings class does not affect the fingerprint of
another. Snakemake imports these modules whenever it reads the workflow: they must not import torch, transformers or
polars.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Settings of one stage.

    The docstring under a field is its row in config/README.md (`eagle3.config.manual`): the first paragraph says what
    the setting means, the second, if any, when to change it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def outside_files(self) -> list[Path]:
        """Return the files that this section names and no stage makes; their content counts as a setting."""
        return []
