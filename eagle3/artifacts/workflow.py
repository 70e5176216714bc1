"""What the Snakefile needs from the package: the checked configuration, and the tracked parameters of every rule.

Snakemake reruns a rule when its `params` change. Ours are one JSON text per rule, the *recipe*: the fingerprint of the
code that makes the artifact, and exactly the settings that the command is given. A stage cannot depend on a setting
that is not tracked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from eagle3.artifacts.registry import STAGES, stage_fingerprint, stage_settings
from eagle3.config.base import Settings
from eagle3.config.configuration import Config, resolve
from eagle3.files.hashing import sha256
from eagle3.target import demo
from eagle3.target.model_folder import revision

HASHES = Path(".snakemake/eagle3-source-hashes.json")


class Workflow:
    """One configuration as the rules see it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.config: Config = resolve(values)
        self._values = self.config.model_dump(mode="json")

    @property
    def parts(self) -> range:
        return range(self.config.prompts.parts)

    @property
    def machine(self) -> str:
        """Where and how fast things run, as JSON: a resource, so that changing it reruns nothing."""
        return _json(self._values["machine"])

    @property
    def demo_files(self) -> list[str]:
        """The model files that the rule `target` makes: none unless the target is the demo."""
        return list(demo.FILES) if self.config.target.model == demo.NAME else []

    def check_training(self, manifest: str) -> None:
        """Raise Eagle3Error if the draft cannot be trained on this machine; a finished one may be served on any.

        Called when the workflow is read, rather than days later, when the training would start.

        Args:
            manifest: path of the draft's manifest.
        """
        if not Path(manifest).exists():
            self.config.draft.check_machine(self.config.machine.device, self.config.machine.gpus)

    def outside_files(self, stage: str) -> list[str]:
        """Return the files from outside the workflow that a stage's sections name, section by section."""
        sections: list[Settings] = [getattr(self.config, section) for section in STAGES[stage].sections]
        return [str(path) for section in sections for path in section.outside_files()]

    def recipe(self, stage: str) -> str:
        """Return, as JSON, what a stage's artifact depends on besides its inputs; also what its command is given.

        Holds the fingerprint of the code and the settings, among them the hashes of files from outside the workflow.
        """
        settings = stage_settings(stage, self._values)
        if files := self.outside_files(stage):
            settings["outside_files"] = _hash_files(files)
        if stage == "target" and Path(self.config.target.model).is_dir():
            settings["folder_revision"] = revision(Path(self.config.target.model))
        return _json({"fingerprint": stage_fingerprint(stage, settings), "settings": settings})


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _hash_files(files: list[str]) -> dict[str, str]:
    """Return the sha256 of each file; cached by size and modification time, so that large files are read once."""
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
