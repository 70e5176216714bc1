"""Drafts that read one or two layers of the target, from the capture to serving and to the next warm start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.config.acceptance import AcceptanceSettings
from eagle3.config.draft import DraftSettings
from eagle3.config.engine import EngineSettings
from eagle3.config.export import ExportSettings
from eagle3.config.hidden_states import HiddenStatesSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.model.network import load_draft
from eagle3.engines.base import GenerationRequest, Sampling, open_engine
from eagle3.files.records import read_records, write_records
from eagle3.stages import acceptance_simulated as simulated
from eagle3.stages import draft as train
from eagle3.stages import export
from eagle3.stages import hidden_states as capture
from eagle3.target.pin import load_target
from tests.draft.conftest import Inputs

ENGINE, MACHINE = EngineSettings(dtype="float32"), MachineSettings(device="cpu", threads=1)
DRAFTS = 2


@pytest.mark.parametrize("layers", [(6,), (2, 6)], ids=str)
def test_fewer_layers_from_the_capture_to_serving(layers: tuple[int, ...], inputs: Inputs, tmp_path: Path) -> None:
    """Measured on training samples: it cannot predict other answers of a random target."""
    folders = [tmp_path / name for name in ("states", "draft", "again", "acceptance", "export")]
    for folder in folders:
        folder.mkdir()
    states, draft, again, acceptance, output = folders
    records = list(read_records(inputs.train))
    evaluation = tmp_path / "eval.jsonl.zst"
    write_records(evaluation, records[:8])
    capture.make(
        HiddenStatesSettings(aux_layer_ids=layers, min_teacher_agreement=0.8),
        ENGINE,
        MACHINE,
        target=inputs.target,
        samples=inputs.train,
        folder=states,
    )
    known = replace(inputs, evaluation=evaluation, hidden_states=sorted(states.glob("shard-*.safetensors")))

    settings = DraftSettings(unroll=3, epochs=12, batch_tokens=96, learning_rate=1e-2, evaluate_every=1000)
    train.make(settings, MACHINE, **vars(known), folder=draft)
    config = load_draft(draft).config
    assert config.aux_layer_ids == layers
    simulated.make(
        AcceptanceSettings(drafts=DRAFTS, prompts=8),
        MACHINE,
        target=inputs.target,
        evaluation=evaluation,
        hidden_states=known.hidden_states,
        draft=draft / "model.safetensors",
        folder=acceptance,
    )
    figures = json.loads((acceptance / "acceptance.json").read_text())
    assert figures["acceptance_length"] > 1.2, "it has learnt too little to be told from a wrong one"

    export.make(ExportSettings(), target=inputs.target, draft=draft / "model.safetensors", folder=output)
    requests = [
        GenerationRequest(id=record["id"], messages=[], seed=0, prompt_ids=record["input_ids"][: record["spans"][0][0]])
        for record in records[:8]
    ]
    served = open_engine(ENGINE, MACHINE, load_target(inputs.target)).serve(
        requests, Sampling(20), output / "plain", DRAFTS
    )
    for record in records[:8]:
        assert served.token_ids[record["id"]] == record["input_ids"][record["spans"][0][0] :]
    steps, accepted = sum(served.steps.values()), sum(sum(counts) for counts in served.accepted.values())
    assert 1 + accepted / steps == pytest.approx(figures["acceptance_length"], rel=0.03)

    first = DraftSettings(unroll=3, epochs=1, batch_tokens=96, learning_rate=1e-9, warm_start=str(output / "plain"))
    counts = train.make(first, MACHINE, **vars(known), folder=again)
    assert counts["acceptance_length"] == pytest.approx(figures["acceptance_length"], rel=0.1)
