"""Small random drafts, samples and heads; every test states what it needs beyond these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config.engine import EngineSettings
from eagle3.config.hidden_states import HiddenStatesSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.data.row import Row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.config import DraftConfig, LatentShape
from eagle3.draft.model.network import Draft
from eagle3.engines.base import Capture
from eagle3.files.records import read_json, write_json, write_records
from eagle3.hidden_states.reader import HiddenStateSample
from eagle3.stages import hidden_states as capture
from eagle3.target.weights import HeadWeights
from tests.conftest import build_once

H, V, A = 32, 97, 3


def random_states(
    name: str, length: int, spans: Sequence[tuple[int, int]], generator: torch.Generator, *, aux: int = A
) -> HiddenStateSample:
    """Random tokens and states; last-layer rows only where the format stores them."""
    rows = [row for start, end in spans for row in range(max(start - 1, 0), end - 1)]
    return HiddenStateSample(
        id=name,
        token_ids=torch.randint(V, (length,), generator=generator, dtype=torch.int32),
        aux=torch.randn(length, aux, H, generator=generator),
        last=torch.randn(len(rows), H, generator=generator),
        last_rows=torch.tensor(rows, dtype=torch.int64),
    )


def with_teacher_stats(row: Row, head: HeadWeights, ids: Tensor) -> Row:
    """The row with what the loss needs of the target's whole distribution; `ids` are the draft vocabulary's tokens."""
    return row.with_teacher_stats([TeacherHead(head, ids, torch.device("cpu"), torch.float32)(row.teacher)])


def tiny_config(**changes: Any) -> DraftConfig:
    """A grouped-query draft with a reduced vocabulary; `latent=True` makes it an MLA draft."""
    if changes.pop("latent", False):
        latent = LatentShape(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
        changes = {"attention": "mla", "latent": latent, "head_dim": 12} | changes
    values: dict[str, Any] = {
        "attention": "gqa",
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "vocab_size": V,
        "draft_vocab_size": 41,
        "aux_layer_ids": tuple(range(1, A + 1)),
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
    }
    return DraftConfig(**(values | changes))


def random_draft(config: DraftConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Draft:
    """A draft whose every weight, norms included, is random."""
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    draft = Draft(config, chosen - torch.arange(len(chosen)), t2d).to(dtype)
    for parameter in draft.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        offset = 0.0 if parameter.dim() > 1 else 1.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return draft


def random_head(generator: torch.Generator, dtype: torch.dtype = torch.float32, vocabulary: int = V) -> HeadWeights:
    """Random embedding, final norm and lm_head of a target."""
    return HeadWeights(
        embedding=torch.randn(vocabulary, H, generator=generator, dtype=dtype),
        norm=1 + 0.3 * torch.randn(H, generator=generator, dtype=dtype),
        lm_head=torch.randn(vocabulary, H, generator=generator, dtype=dtype) / 4,
        rms_norm_eps=1e-5,
    )


@dataclass(frozen=True)
class Inputs:
    """What the stage reads: artifacts of the stages before, made from a real model with their own code."""

    target: Path
    train: Path
    evaluation: Path
    vocabulary: Path
    hidden_states: list[Path]


class LocalEngine:
    """Captures the states of a transformers model."""

    name = "local"
    batch_size = None

    def __init__(self, model: Any) -> None:
        self.model, self.versions = model, {"local": "1"}

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.no_grad()
    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        for ids in sequences:
            last: dict[str, Tensor] = {}
            hook = self.model.model.norm.register_forward_pre_hook(lambda _, x, last=last: last.update(x=x[0]))
            out = self.model(torch.tensor([list(ids)]), output_hidden_states=True)
            hook.remove()
            states = [*(out.hidden_states[i][0] for i in layer_ids[:-1]), last["x"][0]]
            yield Capture(list(ids), torch.stack(states, 1), int(out.logits[0, -1].argmax()))


@pytest.fixture(scope="session")
def inputs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """40 greedy answers of the tiny target, 8 of them held out, with their hidden states in two shards."""
    folder = build_once(tmp_path_factory, "draft-inputs", lambda folder: make_inputs(tiny_target, folder))
    return Inputs(
        target=folder / "target.json",
        train=folder / "train.jsonl.zst",
        evaluation=folder / "eval.jsonl.zst",
        vocabulary=folder / "vocabulary.safetensors",
        hidden_states=sorted((folder / "hidden_states").glob("shard-*.safetensors")),
    )


def make_inputs(tiny_target: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    records = []
    for number in range(40):
        length = 5 + number % 7
        prompt = torch.randint(3, 320, (1, length), generator=generator)
        ids = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
        source = "even" if number % 2 == 0 else "odd"
        records.append(
            {
                "id": f"{number:016x}-0",
                "conversation": f"{number:016x}",
                "source": source,
                "turn": 0,
                "input_ids": ids,
                "spans": [[length, len(ids)]],
                "finish_reason": "length",
            }
        )
    config = {**read_json(tiny_target / "config.json"), "eagle3_eos_token_ids": [2]}
    pin = {"path": str(tiny_target), "revision": "sha256:tiny", "config": config, "trust_remote_code": False}
    write_json(folder / "target.json", pin)
    write_records(folder / "samples.jsonl.zst", records)
    write_records(folder / "train.jsonl.zst", records[8:])
    write_records(folder / "eval.jsonl.zst", records[:8])
    generated = torch.tensor([token for record in records for token in record["input_ids"][record["spans"][0][0] :]])
    used = generated.bincount(minlength=320).sort(descending=True, stable=True).indices[:48].sort().values
    t2d = torch.zeros(320, dtype=torch.bool).index_fill_(0, used, True)
    save_file({"d2t": used - torch.arange(len(used)), "t2d": t2d}, folder / "vocabulary.safetensors")
    states = folder / "hidden_states"
    states.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "open_engine", lambda *_: LocalEngine(model))
        capture.make(
            HiddenStatesSettings(shards=2, min_teacher_agreement=0.8),
            EngineSettings(),
            MachineSettings(threads=1),
            target=folder / "target.json",
            samples=folder / "samples.jsonl.zst",
            folder=states,
        )


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """Processes that are started train on the CPU, however many GPUs there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
