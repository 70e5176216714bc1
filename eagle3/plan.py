"""What a run would do, before it does it.

Snakemake prints the command of every job (`--dry-run --forceall --printshellcmds`). Each command holds everything
that decides its artifact's key, so the plan is the same look-up that the job itself will make.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from eagle3 import manifest as manifests
from eagle3.errors import Eagle3Error
from eagle3.manifest import Manifest
from eagle3.records import read_json
from eagle3.stages import STAGES
from eagle3.store import Store, content_key

_COMMAND = "Shell command: eagle3 "
# Lossless shards take 0.70 of bf16, measured on real states; fp8 takes one byte and a scale.
_BYTES_PER_VALUE = {"lossless": 2 * 0.70, "fp8": 1.02}


@dataclass
class Command:
    """One job, as its command line says."""

    stage: str
    recipe: dict[str, Any]
    inputs: dict[str, list[Path]]
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
    notes: list[str] = field(default_factory=list)


def make_plan(store: Store, arguments: Sequence[str]) -> Plan:
    """Return what `snakemake <arguments>` would compute, adopt from the store, or leave.

    Raises:
        Eagle3Error: Snakemake cannot build the workflow; quotes its last lines.
    """
    commands = _commands(arguments)
    made: dict[Path, Manifest | None] = {}
    rows = {stage: Row(stage) for stage in STAGES}
    waiting = commands
    while waiting:
        folders = {command.output for command in waiting}
        ready = [c for c in waiting if not any(_folder(file, folders) for files in c.inputs.values() for file in files)]
        for command in ready:
            _decide(command, store, made, rows[command.stage])
        waiting = [command for command in waiting if command not in ready]
    notes = _estimate(commands, made, rows)
    total = sum(row.bytes for row in rows.values())
    place = next(folder for folder in (store.results, *store.results.absolute().parents) if folder.exists())
    return Plan([row for row in rows.values() if row.jobs], total, shutil.disk_usage(place).free, notes)


def _commands(arguments: Sequence[str]) -> list[Command]:
    call = [sys.executable, "-m", "snakemake", "--dry-run", "--forceall", "--printshellcmds", "--nolock", *arguments]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Eagle3Error("snakemake cannot build the workflow", found="\n" + (run.stderr + run.stdout)[-2000:])
    lines = (run.stdout + run.stderr).splitlines()
    return [_parse(shlex.split(line.removeprefix(_COMMAND))) for line in lines if line.startswith(_COMMAND)]


def _parse(words: list[str]) -> Command:
    """Read one command line of a rule: global options, the stage, named inputs, output, further inputs."""
    options: dict[str, str] = {}
    loose: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            options[word.removeprefix("--")] = next(rest)
        else:
            loose.append(word)
    stage, *further = loose
    recipe = orjson.loads(options.pop("recipe"))
    output = Path(options.pop("output")).parent
    inputs = {name: [Path(value)] for name, value in options.items() if name not in ("log", "machine")}
    inputs[""] = [Path(name) for name in further]
    return Command(stage.replace("-", "_"), recipe, inputs, output)


def _folder(file: Path, folders: set[Path]) -> Path | None:
    return next((folder for folder in file.parents if folder in folders), None)
