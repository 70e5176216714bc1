"""The whole configuration: one section per stage, checked before anything runs.

No stage imports this module; each sees only its own sections (`eagle3.artifacts.registry`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.base import Settings
from eagle3.config.dataset import DatasetSettings
from eagle3.config.draft import DraftSettings
from eagle3.config.engine import EngineSettings
from eagle3.config.export import ExportSettings
from eagle3.config.hidden_states import HiddenStatesSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.prompts import PromptsSettings
from eagle3.config.responses import ResponsesSettings
from eagle3.config.samples import SamplesSettings
from eagle3.config.synthetic import SyntheticSettings
from eagle3.config.target import TargetSettings
from eagle3.config.vocabulary import VocabularySettings
from eagle3.errors import Eagle3Error

# Sections whose `seed` follows the top-level one unless they set their own.
_SEEDED = ("synthetic", "prompts", "responses", "dataset", "draft")
# Settings of `acceptance` that follow those of `responses` unless set.
_SERVED_LIKE_RESPONSES = ("temperature", "top_p")


class Config(Settings):
    """Everything a user can set."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the folder under `results/`: letters, digits, `.`, `_` and `-`. All runs share one store, so a new name
    recomputes nothing that is unchanged."""
    seed: int = 0
    """Seed of every random choice. Sections with a `seed` of their own follow it unless they set one.

    A change reruns everything from the prompts on."""
    target: TargetSettings = TargetSettings()
    engine: EngineSettings = EngineSettings()
    synthetic: SyntheticSettings = SyntheticSettings()
    prompts: PromptsSettings
    responses: ResponsesSettings = ResponsesSettings()
    samples: SamplesSettings = SamplesSettings()
    dataset: DatasetSettings = DatasetSettings()
    vocabulary: VocabularySettings = VocabularySettings()
    hidden_states: HiddenStatesSettings = HiddenStatesSettings()
    draft: DraftSettings = DraftSettings()
    export: ExportSettings = ExportSettings()
    acceptance: AcceptanceSettings = AcceptanceSettings()
    machine: MachineSettings = MachineSettings()


def resolve(values: Mapping[str, Any], origin: str = "the configuration") -> Config:
    """Check raw values and fill in defaults.

    Args:
        values: as read from YAML, or Snakemake's merged `config`.
        origin: named in errors.

    Raises:
        Eagle3Error: unknown key (with the nearest valid one), wrong type or value; names the key.
    """
    seeded = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for section in _SEEDED:
        part = seeded.setdefault(section, {})
        if isinstance(part, dict):
            part.setdefault("seed", seeded.get("seed", 0))
    responses, acceptance = seeded["responses"], seeded.setdefault("acceptance", {})
    if isinstance(responses, dict) and isinstance(acceptance, dict):
        for key in _SERVED_LIKE_RESPONSES:
            if key in responses:
                acceptance.setdefault(key, responses[key])
    try:
        config = Config.model_validate(seeded)
    except ValidationError as error:
        # An unknown key is often the cause of a missing one.
        faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        raise _explain(faults[0], origin) from None
    if config.prompts.synthetic and config.engine.name == "openai":
        raise Eagle3Error(
            "the target cannot write prompts through this engine",
            where=f"{origin}, key `prompts.sources`",
            found="a source with `synthetic: true` and `engine.name: openai`, which does not accept token ids",
            remedy="set `engine.name` to vllm or transformers, or use another source",
        )
    return config


def load(paths: Sequence[Path]) -> Config:
    """Read one or more YAML files; later files override earlier ones, section by section."""
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Eagle3Error("a configuration file cannot be read", where=path, found=error) from None
        if not isinstance(values, dict):
            raise Eagle3Error("a configuration file has no settings", where=path, expected="a YAML mapping")
        merge(merged, values)
    return resolve(merged, ", ".join(map(str, paths)))


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Override `base` in place, mapping by mapping, as Snakemake does with several configuration files."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def _explain(error: ErrorDetails, origin: str) -> Eagle3Error:
    path = [str(part) for part in error["loc"]]
    parents, key = path[:-1], path[-1]
    where = f"{origin}, key `{'.'.join(path)}`"
    if error["type"] != "extra_forbidden":
        return Eagle3Error(
            "a setting is not valid",
            where=where,
            found=repr(error.get("input")),
            expected=error["msg"],
            remedy="see config/README.md for every setting",
        )
    valid = _keys(parents)
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    return Eagle3Error(
        "the configuration has an unknown key",
        where=where,
        expected=f"one of {', '.join(valid)}",
        remedy=f"did you mean `{near[0]}`?" if near else "see config/README.md for every setting",
    )


def _keys(parents: Sequence[str]) -> list[str]:
    """Return the valid keys of the section that `parents` names."""
    model: Any = Config
    for parent in parents:
        if parent.isdigit():
            continue
        annotation = model.model_fields[parent].annotation
        arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
        model = annotation if hasattr(annotation, "model_fields") else arguments[0]
    return sorted(model.model_fields)
