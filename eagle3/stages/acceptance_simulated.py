"""Simulated acceptance: serving replayed exactly over held-out responses, without an engine."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from eagle3.acceptance.figures import choose, summarise
from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.data.loader import Rows, read_samples
from eagle3.draft.data.teacher import Summariser
from eagle3.draft.model.network import Draft, load_draft
from eagle3.draft.ops.dispatch import pass_dtype
from eagle3.draft.training.evaluation import Evaluation, evaluate
from eagle3.draft.training.metrics import expected_acceptance_length
from eagle3.draft.unroll.objective import Objective, Teacher
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records, write_json
from eagle3.gpus import choose_device
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.pin import load_target
from eagle3.target.weights import HeadWeights, head_weights

# Tokens that pass through the draft together.
BATCH_TOKENS = 8192


def make(
    settings: AcceptanceSettings,
    machine: MachineSettings,
    *,
    target: Path,
    evaluation: Path,
    hidden_states: Sequence[Path],
    draft: Path,
    folder: Path,
) -> dict[str, Any]:
    """Write `acceptance.json`: acceptance length, per position and per source, with k = `settings.drafts`.

    Args:
        settings: the number of drafts.
        machine: device and threads.
        target: `target.json`.
        evaluation: held-out samples.
        hidden_states: shards that hold them.
        draft: `model.safetensors` of the trained draft, its `draft.json` beside it.
        folder: where to work.

    Raises:
        Eagle3Error: the draft is damaged, or the hidden states are of other samples or layers.
    """
    torch.set_num_threads(machine.threads)
    device = choose_device(machine.device)
    trained = load_draft(draft.parent).to(device)
    reader = HiddenStateReader(hidden_states)
    _check_layers(draft, trained.config.aux_layer_ids, reader.provenance.layer_ids[:-1])
    samples, unsupervised = read_samples(evaluation)
    served = {sample["id"] for sample in choose(read_records(evaluation), settings.prompts)}
    rows = Rows(samples, reader, settings.drafts, device)
    found = _replay(trained, head_weights(load_target(target)), rows, device)
    figures = _figures(found, settings.drafts, served)
    write_json(folder / "acceptance.json", figures)
    return {
        "samples": len(samples),
        "unsupervised_samples": unsupervised,
        "steps": figures["steps"],
        "acceptance_length": figures["acceptance_length"],
    }


def _replay(draft: Draft, head: HeadWeights, rows: Rows, device: torch.device) -> Evaluation:
    """Replay serving over all samples of `rows`, with as many drafts as these have steps."""
    dtype = pass_dtype(device)
    rows.summarise(Summariser(head, draft.target_ids, device, dtype))
    return evaluate(
        draft,
        rows,
        Teacher.of(head, draft.target_ids, device, dtype),
        head.embedding.to(device, dtype),
        Objective.of(DraftSettings(unroll=rows.unroll), sampled=False),
        rows.unroll,
        BATCH_TOKENS,
    )


def _figures(found: Evaluation, drafts: int, served: Set[str]) -> dict[str, Any]:
    """Return what `acceptance.json` holds; `served` are the samples whose prompts are served, too."""
    return {
        "kind": "simulated",
        "engine": None,
        **summarise(found.drafted, drafts),
        "on_served_prompts": summarise([entry for entry in found.drafted if entry.sample in served], drafts),
        "expected_acceptance_length": expected_acceptance_length(found.metrics["conditional"]),
        "accuracy": found.metrics["accuracy"],
    }


def _check_layers(draft: Path, trained: Sequence[int], held: Sequence[int]) -> None:
    if trained != held:
        raise Eagle3Error(
            "the draft was trained on other layers than the hidden states hold",
            where=draft,
            found=f"layers {', '.join(map(str, trained))}",
            expected=f"layers {', '.join(map(str, held))}",
            remedy="run snakemake again: it trains a draft on the present hidden states",
        )
