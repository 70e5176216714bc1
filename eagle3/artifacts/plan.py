"""What a run would do, before it does it.

Snakemake prints the command of every job (`--dry-run --forceall --printshellcmds`). Each command holds everything
that decides its artifact's key, so the plan is the same look-up that the job itself will make.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import manifest as manifests
from eagle3.artifacts.job import Job, by_role
from eagle3.artifacts.manifest import Manifest
from eagle3.artifacts.registry import STAGES, stage_fingerprint
from eagle3.artifacts.store import Store, content_key
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import sha256
from eagle3.files.records import read_json

_COMMAND = "Shell command: eagle3 "
# Packed ids and text of one token in the record files, measured on the demo.
_BYTES_PER_TOKEN_ID = 6
# Lossless shards take 0.70 of bf16, measured on real states; fp8 takes one byte and a scale.
_BYTES_PER_VALUE = {"lossless": 2 * 0.70, "fp8": 1.02}


@dataclass
class Command:
    """One job, as its command line says."""

    stage: str
    settings: dict[str, Any]
    inputs: dict[str, list[Path]]
    sources: Sequence[Path]
    output: Path


@dataclass
class Row:
    """The jobs of one stage."""

    stage: str
    jobs: int = 0
    up_to_date: int = 0
    adopted: int = 0
    computed: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class Plan:
    """What is to be done, stage by stage."""

    rows: list[Row]
    bytes: int
    free: int


def make_plan(store: Store, arguments: Sequence[str]) -> Plan:
    """Return what `snakemake <arguments>` would compute, adopt from the store, or leave.

    Raises:
        Eagle3Error: Snakemake cannot build the workflow; quotes its last lines.
    """
    made: dict[Path, Manifest | None] = {}
    rows = {stage: Row(stage) for stage in STAGES}
    waiting = _commands(arguments)
    commands: list[Command] = []
    while waiting:
        pending = {command.output for command in waiting}
        ready = [command for command in waiting if not any(pending & set(file.parents) for file in _files(command))]
        for command in ready:
            made[command.output] = _decide(command, store, made, rows[command.stage])
        waiting = [command for command in waiting if command.output not in made]
        commands += ready
    _estimate(commands, made, rows)
    total = sum(row.bytes for row in rows.values())
    place = next(folder for folder in (store.results, *store.results.absolute().parents) if folder.exists())
    return Plan([row for row in rows.values() if row.jobs], total, shutil.disk_usage(place).free)


def _files(command: Command) -> list[Path]:
    return [file for files in command.inputs.values() for file in files]


def _commands(arguments: Sequence[str]) -> list[Command]:
    call = [
        sys.executable,
        "-m",
        "snakemake",
        "--dry-run",
        "--forceall",
        "--printshellcmds",
        "--nolock",
        *arguments,
    ]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Eagle3Error("snakemake cannot build the workflow", found="\n" + (run.stderr + run.stdout)[-2000:])
    lines = (run.stdout + run.stderr).splitlines()
    return [_parse(shlex.split(line.removeprefix(_COMMAND))) for line in lines if line.startswith(_COMMAND)]


def _parse(words: list[str]) -> Command:
    """Let the command line itself read a rule's command, and note what it would produce."""
    from eagle3.cli.main import app

    noted: list[Command] = []

    class Note(Job):
        def produce(
            self,
            stage: str,
            output: Path,
            inputs: Mapping[str, Path | Sequence[Path]],
            sources: Sequence[Path] = (),
            beside: Sequence[Path] = (),
        ) -> None:
            files = by_role({**inputs, "beside": beside})
            noted.append(Command(stage, self.settings(stage), files, sources, output.parent))

    app(words, obj=Note, standalone_mode=False)
    return noted[0]


def _decide(command: Command, store: Store, made: Mapping[Path, Manifest | None], row: Row) -> Manifest | None:
    """Count a job as up to date, adopted or to compute; return its manifest if the store has it."""
    row.jobs += 1
    hashes = {role: [_hash(file, made) for file in files] for role, files in sorted(command.inputs.items())}
    found = None
    if all(digest for digests in hashes.values() for digest in digests):
        inputs = {role: {str(i): digest or "" for i, digest in enumerate(digests)} for role, digests in hashes.items()}
        sources = {str(file): sha256(file) for file in command.sources}
        fingerprint = stage_fingerprint(command.stage, command.settings)
        found = store.find(command.stage, content_key(command.stage, fingerprint, command.settings, inputs, sources))
    if found is None:
        row.computed += 1
    elif (command.output / manifests.NAME).is_file() and manifests.read(command.output).key == found.key:
        row.up_to_date += 1
    else:
        row.adopted += 1
    return found


def _hash(file: Path, made: Mapping[Path, Manifest | None]) -> str | None:
    """Return the hash that an input will have, or None where a job must make it first."""
    folder = next((folder for folder in file.parents if folder in made), None)
    if folder is None:
        return manifests.entry_of(file)[1].sha256
    manifest = made[folder]
    return manifest.files[file.relative_to(folder).as_posix()].sha256 if manifest else None


def _estimate(commands: Sequence[Command], made: Mapping[Path, Manifest | None], rows: Mapping[str, Row]) -> None:
    """Fill in tokens and bytes of what is to be computed, from what is known of the run so far.

    Tokens come from the nearest finished stage before; before any response exists, the configured maximum counts.
    """
    by_stage: dict[str, list[Command]] = {}
    for command in commands:
        by_stage.setdefault(command.stage, []).append(command)
    most = by_stage["responses"][0].settings["responses"]["max_tokens"] if "responses" in by_stage else 0
    prompts = _counts(by_stage.get("prompts", []), made).get("prompts", 0)
    for command in by_stage.get("synthetic", []):
        chosen = command.settings["synthetic"]
        rows["synthetic"].tokens = chosen["count"] * chosen["max_tokens"] * rows["synthetic"].computed
    tokens = _counts(by_stage.get("samples", []), made).get("tokens") or prompts * most
    for stage in ("responses", "samples", "dataset", "hidden_states", "draft"):
        rows[stage].tokens = tokens * rows[stage].computed // max(rows[stage].jobs, 1)
    for stage in ("responses", "samples", "dataset"):
        rows[stage].bytes = rows[stage].tokens * _BYTES_PER_TOKEN_ID
    if "hidden_states" in by_stage:
        settings = by_stage["hidden_states"][0].settings["hidden_states"]
        # Three auxiliary layers unless set, and the last one.
        states = len(settings["aux_layer_ids"] or range(3)) + 1
        per_token = states * _hidden_size(by_stage.get("target", [])) * _BYTES_PER_VALUE[settings["encoding"]]
        rows["hidden_states"].bytes = int(rows["hidden_states"].tokens * per_token)


def _counts(commands: Sequence[Command], made: Mapping[Path, Manifest | None]) -> dict[str, int]:
    """Add up the counts of a stage's jobs; empty unless all of them are known."""
    total: dict[str, int] = {}
    for command in commands:
        manifest = made[command.output]
        if manifest is None:
            return {}
        for name, count in manifest.counts.items():
            if isinstance(count, int):
                total[name] = total.get(name, 0) + count
    return total


def _hidden_size(commands: Sequence[Command]) -> int:
    pin = commands[0].output / "target.json" if commands else Path()
    return int(read_json(pin)["config"]["hidden_size"]) if pin.is_file() else 0
