"""The stages in their order: which code makes each, and which sections of the configuration it may see.

Stage name, configuration section, results folder, rule file and module carry one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3.artifacts.fingerprint import fingerprint


@dataclass(frozen=True)
class Stage:
    """One step from prompts to a measured draft."""

    name: str
    modules: tuple[str, ...]
    """Modules whose import closure makes the artifact."""
    sections: tuple[str, ...]
    """Sections of the configuration that the stage sees, and that its key covers."""
    engine_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Engine -> modules that count only with it, and that nothing imports by name."""
    machine: bool = False
    """Whether it computes with a model, and so is told about the machine."""


STAGES = {
    stage.name: stage
    for stage in (
        Stage("target", ("eagle3.target.pin",), ("target",)),
        Stage("written", ("eagle3.written",), ("written", "engine"), machine=True),
        Stage("prompts", ("eagle3.prompts",), ("prompts",)),
        Stage("responses", ("eagle3.responses",), ("responses", "engine"), machine=True),
        Stage("samples", ("eagle3.samples",), ("samples",)),
        Stage("dataset", ("eagle3.dataset",), ("dataset",)),
        Stage("vocabulary", ("eagle3.vocabulary",), ("vocabulary",)),
        Stage(
            "hidden_states",
            ("eagle3.hidden_states.capture",),
            ("hidden_states", "engine"),
            engine_modules={"vllm": ("eagle3.hidden_states.vllm_connector",)},
            machine=True,
        ),
        Stage("draft", ("eagle3.draft.train",), ("draft",), machine=True),
        Stage("export", ("eagle3.export",), ("export",)),
        Stage("acceptance_simulated", ("eagle3.acceptance.simulated",), ("acceptance",), machine=True),
        Stage(
            "acceptance_served",
            ("eagle3.acceptance.served",),
            ("acceptance", "engine"),
            engine_modules={"transformers": ("eagle3.engines.speculation",)},
            machine=True,
        ),
        Stage("report", ("eagle3.report",), ()),
    )
}


def stage_settings(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that a stage sees: section name -> its settings."""
    return {section: config[section] for section in STAGES[name].sections}


def stage_fingerprint(name: str, settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of the code that makes a stage's artifact under these settings.

    The module of the chosen engine counts where the stage uses an engine; the other engines' do not.
    """
    stage = STAGES[name]
    modules = stage.modules
    if "engine" in stage.sections:
        engine = settings["engine"]["name"]
        modules += (f"eagle3.engines.{engine}", *stage.engine_modules.get(engine, ()))
    return fingerprint(modules)
