"""What the Snakefile asks of the package: the checked configuration, and the tracked parameters of every rule.

Snakemake reruns a rule when its `params` change. Ours are one JSON text per rule, the *recipe*: the fingerprint of the
code that makes the artifact, and exactly the settings that the command is given. A stage cannot depend on a setting
that is not tracked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from eagle3.artifacts import manifest
from eagle3.artifacts.registry import stage_fingerprint, stage_settings
from eagle3.config.configuration import Config, resolve
from eagle3.draft.model.warm_start import config_file
from eagle3.files.hashing import sha256
from eagle3.stages.prompts import outside_files

DEMO = "smollm2-135m-instruct"
# Files of the demo target that later jobs read; declared so that Snakemake knows them.
DEMO_FILES = (
    "chat_template.jinja",
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
HASHES = Path(".snakemake/eagle3-source-hashes.json")


class Workflow:
    """One configuration as the rules see it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.config: Config = resolve(values)
        self._values = self.config.model_dump(mode="json")
        # Said before the first stage rather than days later, by the last; where the draft is there, it is of no matter.
        if not Path("results", self.config.run, "draft", manifest.NAME).exists():
            self.config.draft.check_machine(self.config.machine.device, self.config.machine.gpus)

    @property
    def parts(self) -> range:
        return range(self.config.prompts.parts)

    @property
    def machine(self) -> str:
        """Where and how fast things run, as JSON: a resource, so that changing it reruns nothing."""
        return _json(self._values["machine"])

    def prompt_sources(self) -> list[str]:
        """Return the files of all prompt sources, source by source, sorted within each, then those of evaluations."""
        return [str(path) for path in outside_files(self.config.prompts)]

    def demo_model_files(self) -> list[str]:
        """Return the model files that the rule `target` makes: none unless the target is the demo."""
        return list(DEMO_FILES) if self.config.target.model == DEMO else []

    def recipe(self, stage: str) -> str:
        """Return, as JSON, what a stage's artifact depends on besides its inputs; also what its command is given.

        Holds the settings, the fingerprint of the code, and the hashes of files from outside the workflow.
        """
        settings = self._settings(stage)
        sources = _hash_files(self.prompt_sources()) if stage == "prompts" else {}
        return _json({"fingerprint": stage_fingerprint(stage, settings), "settings": settings, "sources": sources})

    def _settings(self, stage: str) -> dict[str, Any]:
        settings = stage_settings(stage, self._values)
        if stage == "target" and Path(self.config.target.model).is_dir():
            from eagle3.target.model_folder import revision

            settings["folder_revision"] = revision(Path(self.config.target.model))
        if stage == "draft" and self.config.draft.warm_start is not None:
            folder = Path(self.config.draft.warm_start)
            # Where one is missing, the stage itself says so.
            files = [path for path in (folder / "model.safetensors", config_file(folder)) if path and path.is_file()]
            settings["warm_start_sha256"] = _hash_files([str(path) for path in files])
        return settings


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _hash_files(files: list[str]) -> dict[str, str]:
    """Return the sha256 of each file; remembered by size and time, so that large sources are read once."""
    known: dict[str, list[Any]] = orjson.loads(HASHES.read_bytes()) if HASHES.is_file() else {}
    hashes = {}
    for name in files:
        stat = Path(name).stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        if known.get(name, [None])[:3] != mark:
            known[name] = [*mark, sha256(Path(name))]
        hashes[name] = known[name][3]
    if HASHES.parent.is_dir():
        HASHES.write_bytes(orjson.dumps(known))
    return hashes
