"""Training: from captured hidden states to a draft model; a run that was killed resumes from its last checkpoint.

In: samples (training and held-out), their hidden states, the draft vocabulary. Out: the weights with the best simulated
acceptance length, their config, the log.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.console import summary
from eagle3.draft import parallel
from eagle3.draft.data.loader import data_digest, read_samples
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.config import draft_config
from eagle3.draft.model.initialization import initialize
from eagle3.draft.model.network import Draft
from eagle3.draft.ops.float8 import require_float8
from eagle3.draft.training.logs import TIMING
from eagle3.draft.training.trainer import Trainer
from eagle3.files.hashing import sha256
from eagle3.files.records import RecordLog, read_json, write_json
from eagle3.gpus import choose_device
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.pin import load_target
from eagle3.target.weights import head_weights

# The counts of process 0, for the process that started it.
COUNTS = ".counts.json"


def make(
    settings: DraftSettings,
    machine: MachineSettings,
    *,
    target: Path,
    train: Path,
    evaluation: Path,
    vocabulary: Path,
    hidden_states: Sequence[Path],
    folder: Path,
) -> dict[str, Any]:
    """Train a draft model and keep the weights with the best simulated acceptance length.

    Writes `model.safetensors` (float32 master weights under the engines' tensor names), `draft.json`, `log.jsonl` and
    `metrics.json`; on GPUs also `timing.jsonl`, the only file that differs between identical runs.
    With `machine.gpus` > 1 one process per GPU trains on its share of the rows: the same result up to rounding.

    Returns:
        counts for the console.

    Raises:
        Eagle3Error: inputs do not fit together; `accumulate` is not a multiple of the number of GPUs; settings or data
            changed since the last start; gradients stay non-finite; `float8` on a device without it.
    """
    settings.check_machine(machine.device, machine.gpus)
    work = functools.partial(
        _train, settings, machine, target, train, evaluation, vocabulary, list(hidden_states), folder
    )
    if machine.gpus > 1:
        parallel.launch(machine.gpus, work)
    else:
        work()
    if (folder / TIMING).exists():
        show_speed(folder / TIMING)
    counts: dict[str, Any] = read_json(folder / COUNTS)
    return counts


def show_speed(timing: Path) -> None:
    """Print a training run's speed: medians, since evaluations and checkpoints slow down single lines of the log."""
    with RecordLog(timing) as log:
        lines = log.records
    rates = {name: statistics.median(line[name] for line in lines) for name in lines[0] if name != "step"}
    summary("draft: speed (medians)", {name: float(f"{rate:.4g}") for name, rate in rates.items()})


def _train(
    settings: DraftSettings,
    machine: MachineSettings,
    target: Path,
    train: Path,
    evaluation: Path,
    vocabulary: Path,
    hidden_states: Sequence[Path],
    folder: Path,
) -> None:
    torch.set_num_threads(machine.threads)
    device = choose_device(machine.device)
    if settings.float8:
        require_float8(device)
    pinned = load_target(target)
    reader = HiddenStateReader(hidden_states)
    tensors = load_file(vocabulary)
    samples, unsupervised = read_samples(train)
    held_out, _ = read_samples(evaluation)
    identity = {
        **{f"draft.{name}": value for name, value in settings.model_dump().items()},
        "target": pinned.revision,
        "vocabulary": sha256(vocabulary),
        "train": data_digest(samples),
        "evaluation": data_digest(held_out),
    }
    config = draft_config(settings, pinned, len(tensors["d2t"]), reader.provenance.layer_ids[:-1])
    draft = Draft(config, tensors["d2t"], tensors["t2d"])
    head = head_weights(pinned)
    initialize(draft, settings, pinned, head)
    trainer = Trainer(
        settings,
        draft,
        head,
        samples,
        held_out,
        reader,
        machine=machine,
        folder=folder,
        identity=identity,
        device=device,
    )
    counts = trainer.train(TeacherHead(head, trainer.draft.target_ids, device, trainer.embedding.dtype))
    if trainer.writes:
        write_json(folder / COUNTS, counts | {"unsupervised_samples": unsupervised})
