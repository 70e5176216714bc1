"""Simulated acceptance equals real draft-and-verify decoding, run step by step with the slow reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.draft import DraftSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.model.network import load_draft
from eagle3.draft.unroll.reference import ReferenceChain
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_records, write_records
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.stages import acceptance_simulated as simulated
from eagle3.stages import draft as train
from eagle3.target.pin import load_target
from eagle3.target.weights import head_weights
from tests.draft.conftest import Inputs

DRAFTS = 3
MACHINE = MachineSettings(device="cpu", threads=1)


@pytest.fixture(scope="module")
def known(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Inputs whose evaluation samples are training samples: a random target's answers cannot be guessed."""
    evaluation = tmp_path_factory.mktemp("known") / "eval.jsonl.zst"
    write_records(evaluation, list(read_records(inputs.train))[:8])
    return replace(inputs, evaluation=evaluation)


@pytest.fixture(scope="module")
def draft(known: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that knows the samples it is measured on well enough to be right now and then."""
    folder = tmp_path_factory.mktemp("draft")
    settings = DraftSettings(unroll=3, epochs=16, batch_tokens=96, learning_rate=1e-2, evaluate_every=1000)
    train.make(settings, MACHINE, **vars(known), folder=folder)
    return folder / "model.safetensors"


def measure(known: Inputs, draft: Path, folder: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    simulated.make(
        AcceptanceSettings(drafts=drafts),
        MACHINE,
        target=known.target,
        evaluation=known.evaluation,
        hidden_states=known.hidden_states,
        draft=draft,
        folder=folder,
    )
    found: dict[str, Any] = json.loads((folder / "acceptance.json").read_text())
    return found


@torch.no_grad()
def serve(chain: ReferenceChain, tokens: list[int], aux: torch.Tensor, span: tuple[int, int]) -> list[int]:
    """Decode one generation by draft and verify; return the accepted drafts of every step.

    The drafts are fed with themselves. The target's answer is known, so verifying is comparing.
    """
    start, end = span
    features = chain.features(aux)
    ids = (chain.weights["d2t"] + torch.arange(len(chain.weights["d2t"]))).tolist()
    committed, steps = start + 1, []
    while committed < end:
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p in range(committed - 1):
            feature, logits = chain.step(tokens[p + 1], features[p], p, cache)
        kept = 0
        while kept < DRAFTS and committed + kept < end and ids[int(logits.argmax())] == tokens[committed + kept]:
            kept += 1
            feature, logits = chain.step(tokens[committed + kept - 1], feature, committed + kept - 2, cache)
        steps.append(kept)
        committed += kept + 1
    return steps


def test_it_equals_draft_and_verify_decoding(known: Inputs, draft: Path, tmp_path: Path) -> None:
    found = measure(known, draft, tmp_path)
    reader = HiddenStateReader(known.hidden_states)
    chain = ReferenceChain(load_draft(draft.parent), head_weights(load_target(known.target)).embedding)
    steps: dict[str, list[int]] = {"even": [], "odd": []}
    for record in read_records(known.evaluation):
        states = reader.read(record["id"])
        steps[record["source"]] += serve(chain, record["input_ids"], states.aux.float(), record["spans"][0])
    together = steps["even"] + steps["odd"]
    assert len(set(together)) > 2, "the draft is almost never right: little is tested"
    assert found["kind"] == "simulated"
    assert found["drafts"] == DRAFTS
    assert found["steps"] == len(together)
    assert found["accepted"] == [sum(kept > i for kept in together) for i in range(DRAFTS)]
    assert found["acceptance_length"] == pytest.approx(1 + sum(together) / len(together))
    for source, kept in steps.items():
        assert found["per_source"][source]["acceptance_length"] == pytest.approx(1 + sum(kept) / len(kept))


def test_training_reports_the_same_figure(known: Inputs, draft: Path, tmp_path: Path) -> None:
    found = measure(known, draft, tmp_path)
    metrics = json.loads((draft.parent / "metrics.json").read_text())
    assert found["acceptance_length"] == metrics["acceptance_length"]
    assert found["per_source"] == metrics["per_source"]


def test_more_drafts_than_were_trained_can_be_measured(known: Inputs, draft: Path, tmp_path: Path) -> None:
    longer = measure(known, draft, tmp_path, drafts=6)
    assert longer["acceptance_length"] >= measure(known, draft, tmp_path)["acceptance_length"]


def test_a_draft_of_other_layers_is_refused(known: Inputs, draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft.parent / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(config | {"aux_layer_ids": [1, 4, 5]}))
    (tmp_path / "model.safetensors").write_bytes(draft.read_bytes())
    with pytest.raises(Eagle3Error, match="different layers"):
        measure(known, tmp_path / "model.safetensors", tmp_path)
