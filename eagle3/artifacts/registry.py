"""The stages in their order: which code makes each, and which sections of the configuration it may see.

Stage, configuration section, results folder, rule file and module share one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3.artifacts.fingerprint import fingerprint
from eagle3.engines.base import ENGINES


@dataclass(frozen=True)
class Stage:
    """One step from prompts to a measured draft."""

    name: str
    sections: tuple[str, ...]
    """Sections of the configuration that the stage sees, and that its key covers."""
    engine_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Engine -> modules that count only with it, and that are loaded by a string: all of their code counts."""
    machine: bool = False
    """Whether it computes with a model, and so gets the `machine` settings."""

    @property
    def module(self) -> str:
        """The module whose `make` produces the artifact."""
        return f"eagle3.stages.{self.name}"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("target", ("target",)),
        Stage("synthetic", ("synthetic", "engine"), machine=True),
        Stage("prompts", ("prompts",)),
        Stage("responses", ("responses", "engine"), machine=True),
        Stage("samples", ("samples",)),
        Stage("dataset", ("dataset",)),
        Stage("vocabulary", ("vocabulary",)),
        Stage(
            "hidden_states",
            ("hidden_states", "engine"),
            engine_modules={"vllm": ("eagle3.engines.vllm.connector",)},
            machine=True,
        ),
        Stage("draft", ("draft",), machine=True),
        Stage("export", ("export",)),
        Stage("acceptance_simulated", ("acceptance",), machine=True),
        Stage(
            "acceptance_served",
            ("acceptance", "engine"),
            engine_modules={"transformers": ("eagle3.engines.transformers.speculation",)},
            machine=True,
        ),
        Stage("report", ()),
    )
}


def stage_settings(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that a stage sees: section name -> its settings."""
    return {section: config[section] for section in STAGES[name].sections}


def stage_fingerprint(name: str, settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of the code that makes a stage's artifact under these settings.

    The code of the chosen engine counts where the stage uses an engine; that of the others does not.
    The supervisor of a managed server does not count either, though it is started by a string: it ends processes and
    never sees a request or an answer.
    """
    stage = STAGES[name]
    # The settings reach `make` as objects that another module builds.
    roots = [f"{stage.module}:make", *(f"eagle3.config.{section}" for section in stage.sections)]
    if "engine" in stage.sections:
        engine = settings["engine"]["name"]
        roots += [f"{ENGINES[engine]}:open_engine", *stage.engine_modules.get(engine, ())]
    return fingerprint(roots)
