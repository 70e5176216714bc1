"""What a run would do, before it does it.

Snakemake lists every job with its command (a forced dry run). The command holds everything that decides the key of
the job's artifact, so the plan looks up what the job itself will look up.
"""

from __future__ import annotations

import io
import logging
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
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

RunCommand = Callable[[list[str], Callable[..., Job]], object]
"""Runs the words of an `eagle3` command, with the second argument in place of `Job`."""

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
class StagePlan:
    """The jobs of one stage."""

    stage: str
    jobs: int = 0
    up_to_date: int = 0
    adopted: int = 0
    computed: int = 0
    tokens: int = 0
    bytes: int = 0
    acceptable: int = 0
    """Of those to compute, jobs whose artifact was made by earlier code from the same settings and inputs."""
    acceptable_tokens: int = 0
    acceptable_bytes: int = 0


@dataclass
class Plan:
    """What is to be done, stage by stage."""

    stages: list[StagePlan]
    bytes: int
    free: int


@dataclass
class Known:
    """The artifact of a job, as far as it is known before the run."""

    manifest: Manifest | None
    """From the store; None if the job is to be computed."""
    if_accepted: Manifest | None
    """The same, if every artifact that `eagle3 accept` could enter in the store were in it."""


def make_plan(store: Store, arguments: Sequence[str], run_command: RunCommand) -> Plan:
    """Return what `snakemake <arguments>` would compute, adopt from the store, or leave.

    Args:
        store: where finished artifacts are looked up.
        arguments: as given to Snakemake.
        run_command: the command line, which reads the command of a rule.

    Raises:
        Eagle3Error: Snakemake cannot build the workflow; quotes its last lines.
    """
    known: dict[Path, Known] = {}
    stages = {stage: StagePlan(stage) for stage in STAGES}
    commands: list[Command] = []
    for words in _shell_commands(arguments):
        run_command(words, lambda **options: _RecordingJob(commands, **options))
    waiting = commands
    while waiting:
        pending = {command.output for command in waiting}
        ready = [command for command in waiting if not any(pending & set(file.parents) for file in _files(command))]
        for command in ready:
            known[command.output] = _decide(command, store, known, stages[command.stage])
        waiting = [command for command in waiting if command.output not in known]
    _estimate(commands, {output: found.manifest for output, found in known.items()}, stages)
    total = sum(stage.bytes for stage in stages.values())
    place = next(folder for folder in (store.results, *store.results.absolute().parents) if folder.exists())
    return Plan([stage for stage in stages.values() if stage.jobs], total, shutil.disk_usage(place).free)


class _RecordingJob(Job):
    """Records what a command would produce instead of producing it."""

    def __init__(self, commands: list[Command], **options: Any) -> None:
        super().__init__(**options)
        self._commands = commands

    def produce(
        self,
        stage: str,
        output: Path,
        inputs: Mapping[str, Path | Sequence[Path]],
        sources: Sequence[Path] = (),
        beside: Sequence[Path] = (),
    ) -> None:
        files = by_role({**inputs, "beside": beside})
        self._commands.append(Command(stage, self.settings(stage), files, sources, output.parent))


def _files(command: Command) -> list[Path]:
    return [file for files in command.inputs.values() for file in files]


class _Listener(logging.Handler):
    """Collects what Snakemake reports: the commands of jobs, and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[str] = []
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        from snakemake_interface_logger_plugins.common import LogEvent

        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())
        elif getattr(record, "event", None) == LogEvent.JOB_INFO and (command := record.__dict__["shellcmd"]):
            self.commands.append(command)


def _shell_commands(arguments: Sequence[str]) -> list[list[str]]:
    """Return the words of the command of every job of the workflow, whether it is up to date or not."""
    from snakemake import cli

    listener, printed = _Listener(), io.StringIO()
    logging.getLogger().addHandler(listener)
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            parser, options = cli.parse_args([*arguments])
            options.dryrun = options.forceall = options.nolock = True
            done = cli.args_to_api(options, parser)
    except SystemExit:
        done = False
    finally:
        logging.getLogger().removeHandler(listener)
    if not done:
        raise Eagle3Error(
            "snakemake cannot build the workflow",
            found="\n" + ("\n".join(listener.errors) or printed.getvalue())[-2000:],
        )
    return [words[1:] for words in map(shlex.split, listener.commands) if words[0] == "eagle3"]


def _decide(command: Command, store: Store, known: Mapping[Path, Known], plan: StagePlan) -> Known:
    """Count a job as up to date, adopted or to compute; return its artifact if there is one."""
    plan.jobs += 1
    sources = {str(file): sha256(file) for file in command.sources}
    inputs = _hashes(command, {output: artifact.manifest for output, artifact in known.items()})
    found = _find(command, store, inputs, sources)
    if found is not None:
        manifest_file = command.output / manifests.NAME
        if manifest_file.is_file() and manifests.read(command.output).key == found.key:
            plan.up_to_date += 1
        else:
            plan.adopted += 1
        return Known(found, found)
    plan.computed += 1
    inputs = _hashes(command, {output: artifact.if_accepted for output, artifact in known.items()})
    adoptable = _find(command, store, inputs, sources)
    if adoptable is not None:
        return Known(None, adoptable)
    earlier = _earlier(command, inputs, sources)
    if earlier is not None:
        tokens = earlier.counts.get("tokens", 0)
        plan.acceptable += 1
        plan.acceptable_tokens += tokens if isinstance(tokens, int) else 0
        plan.acceptable_bytes += sum(file.bytes for file in earlier.files.values())
    return Known(None, earlier)


def _find(
    command: Command, store: Store, inputs: dict[str, dict[str, str]] | None, sources: dict[str, str]
) -> Manifest | None:
    """Look the command's artifact up; None also if an input must be made first."""
    if inputs is None:
        return None
    fingerprint = stage_fingerprint(command.stage, command.settings)
    return store.find(command.stage, content_key(command.stage, fingerprint, command.settings, inputs, sources))


def _earlier(command: Command, inputs: dict[str, dict[str, str]] | None, sources: dict[str, str]) -> Manifest | None:
    """Return the manifest of the run's present artifact if only its code differs from what the command asks for."""
    if inputs is None or not (command.output / manifests.NAME).is_file():
        return None
    found = manifests.read(command.output)
    asked = content_key(command.stage, found.fingerprint, command.settings, inputs, sources)
    made = content_key(found.stage, found.fingerprint, found.settings, found.inputs, found.sources)
    return found if asked == made else None


def _hashes(command: Command, made: Mapping[Path, Manifest | None]) -> dict[str, dict[str, str]] | None:
    """Return the hashes of the inputs by role, or None if a job must make one of them first."""
    hashes: dict[str, dict[str, str]] = {}
    for role, files in sorted(command.inputs.items()):
        hashes[role] = {}
        for file in files:
            digest = _hash(file, made)
            if digest is None:
                return None
            hashes[role][str(file)] = digest
    return hashes


def _hash(file: Path, made: Mapping[Path, Manifest | None]) -> str | None:
    """Return the hash that an input will have, or None if a job must make it first."""
    folder = next((folder for folder in file.parents if folder in made), None)
    if folder is None:
        return manifests.entry_of(file)[1].sha256
    manifest = made[folder]
    return manifest.files[file.relative_to(folder).as_posix()].sha256 if manifest else None


def _estimate(
    commands: Sequence[Command], made: Mapping[Path, Manifest | None], stages: Mapping[str, StagePlan]
) -> None:
    """Estimate tokens and bytes of what is to be computed, and write them into `stages`.

    Tokens are those of the finished samples; before there are any, prompts times the configured maximum.
    """
    by_stage: dict[str, list[Command]] = {}
    for command in commands:
        by_stage.setdefault(command.stage, []).append(command)
    max_tokens = by_stage["responses"][0].settings["responses"]["max_tokens"] if "responses" in by_stage else 0
    prompts = _counts(by_stage.get("prompts", []), made).get("prompts", 0)
    for command in by_stage.get("synthetic", []):
        chosen = command.settings["synthetic"]
        stages["synthetic"].tokens = chosen["count"] * chosen["max_tokens"] * stages["synthetic"].computed
    tokens = _counts(by_stage.get("samples", []), made).get("tokens") or prompts * max_tokens
    for stage in ("responses", "samples", "dataset", "hidden_states", "draft"):
        stages[stage].tokens = tokens * stages[stage].computed // max(stages[stage].jobs, 1)
    for stage in ("responses", "samples", "dataset"):
        stages[stage].bytes = stages[stage].tokens * _BYTES_PER_TOKEN_ID
    if "hidden_states" in by_stage:
        settings = by_stage["hidden_states"][0].settings["hidden_states"]
        # Three auxiliary layers unless set, and the last one.
        states = len(settings["aux_layer_ids"] or range(3)) + 1
        per_token = states * _hidden_size(by_stage.get("target", [])) * _BYTES_PER_VALUE[settings["encoding"]]
        stages["hidden_states"].bytes = int(stages["hidden_states"].tokens * per_token)


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
