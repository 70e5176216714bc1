"""Simulated acceptance: serving replayed exactly over held-out responses, without an engine.

In: held-out samples, their hidden states, a trained draft model. Out: `acceptance.json`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from eagle3.acceptance.figures import acceptance_figures, choose
from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.data.loader import RowLoader, read_samples
from eagle3.draft.data.teacher import TeacherHead
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

# Tokens per pass through the draft model.
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
        settings: the number of draft tokens per step.
        machine: device and threads.
        target: `target.json`.
        evaluation: held-out samples.
        hidden_states: shards with their hidden states.
        draft: `model.safetensors` of the trained draft, its `draft.json` next to it.
        folder: the work folder, which becomes the artifact.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: the draft is damaged, or the hidden states belong to other samples or layers.
    """
    torch.set_num_threads(machine.threads)
    device = choose_device(machine.device)
    trained = load_draft(draft.parent).to(device)
    reader = HiddenStateReader(hidden_states)
    _check_layers(draft, trained.config.aux_layer_ids, reader.provenance.layer_ids[:-1])
    samples, unsupervised = read_samples(evaluation)
    served = {sample["id"] for sample in choose(read_records(evaluation), settings.prompts)}
    loader = RowLoader(samples, reader, settings.drafts, device)
    found = _replay(trained, head_weights(load_target(target)), loader, device)
    figures = _figures(found, settings.drafts, served)
    write_json(folder / "acceptance.json", figures)
    return {
        "samples": len(samples),
        "unsupervised_samples": unsupervised,
        "steps": figures["steps"],
        "acceptance_length": figures["acceptance_length"],
    }


def _replay(draft: Draft, head: HeadWeights, loader: RowLoader, device: torch.device) -> Evaluation:
    """Replay serving over all samples of `loader`, with as many draft tokens as its unroll has steps."""
    dtype = pass_dtype(device)
    loader.load_teacher_stats(TeacherHead(head, draft.target_ids, device, dtype))
    return evaluate(
        draft,
        loader,
        Teacher.of(head, draft.target_ids, device, dtype),
        head.embedding.to(device, dtype),
        Objective.of(DraftSettings(unroll=loader.unroll), sampled=False),
        loader.unroll,
        BATCH_TOKENS,
    )


def _figures(found: Evaluation, draft_tokens: int, served: Set[str]) -> dict[str, Any]:
    """Return the content of `acceptance.json`; `served` are the samples whose prompts are also served by an engine."""
    return {
        "kind": "simulated",
        "engine": None,
        **acceptance_figures(found.generations, draft_tokens),
        "on_served_prompts": acceptance_figures(
            [entry for entry in found.generations if entry.sample in served], draft_tokens
        ),
        "expected_acceptance_length": expected_acceptance_length(found.metrics["conditional"]),
        "accuracy": found.metrics["accuracy"],
    }


def _check_layers(draft: Path, trained: Sequence[int], captured: Sequence[int]) -> None:
    if trained != captured:
        raise Eagle3Error(
            "the draft was trained on different layers than those captured",
            where=draft,
            found=f"layers {', '.join(map(str, trained))}",
            expected=f"layers {', '.join(map(str, captured))}",
            remedy="run snakemake again: it trains a draft on the current hidden states",
        )
