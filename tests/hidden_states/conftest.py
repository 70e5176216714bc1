"""A tiny real Llama with weights in its norms, greedy samples of it, and an engine that captures its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.config.engine import EngineSettings
from eagle3.config.hidden_states import HiddenStatesSettings
from eagle3.config.machine import MachineSettings
from eagle3.engines.base import Capture, Engine, Generation, GenerationRequest, Sampling, Served
from eagle3.files.records import Record, write_records
from eagle3.stages import hidden_states as capture

LAYERS, H, V = 8, 48, 211
Alter = Callable[[Capture, int], Capture | None]


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # With weights of 1, a norm applied twice would change nothing.
        model.model.norm.weight.uniform_(-2, 2)
    return model


@pytest.fixture(scope="session")
def target(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pin of the tiny model."""
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder / "model")
    pin = folder / "target.json"
    config = {**model.config.to_dict(), "eagle3_eos_token_ids": [2], "dtype": "float32"}
    value = {"path": "model", "revision": "sha256:one", "config": config, "trust_remote_code": False}
    pin.write_bytes(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))
    return pin


@pytest.fixture(scope="session")
def records(model: LlamaForCausalLM) -> list[Record]:
    """22 samples with greedy spans: several lengths (one of several frames), two spans, a duplicate, a span of one."""
    generator = torch.Generator().manual_seed(1)
    found: list[Record] = []
    for number in range(20):
        length = 600 if number == 0 else 8 + 3 * number
        prompt = torch.randint(3, V, (1, length), generator=generator)
        ids = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
        spans = [[length, len(ids)]] if number % 3 else [[2, 5], [length, len(ids)]]
        found.append({"id": f"s{number:02}-0", "input_ids": ids, "spans": spans})
    found.append({"id": "twin-1", "input_ids": found[3]["input_ids"], "spans": [[4, 9]]})
    found.append({"id": "short-0", "input_ids": found[5]["input_ids"][:6], "spans": [[5, 6]]})
    return found


@pytest.fixture
def samples(records: list[Record], tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl.zst"
    write_records(path, records)
    return path


class TinyEngine(Engine):
    """Runs the tiny model; `alter` can spoil what it returns (gets the capture and how many came before)."""

    name = "tiny"

    def __init__(
        self, model: LlamaForCausalLM, *, batch_size: int | None = None, alter: Alter | None = None, order: int = 1
    ) -> None:
        self.model, self.batch_size, self.alter, self.order = model, batch_size, alter, order
        self.versions = {"tiny": "1"}
        self.captured: list[list[int]] = []

    @torch.no_grad()
    def capture(self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> Iterator[Capture]:
        last: dict[str, torch.Tensor] = {}
        for ids in list(sequences)[:: self.order]:
            hook = self.model.model.norm.register_forward_pre_hook(lambda _, x: last.update(x=x[0]))
            out = self.model(torch.tensor([ids]), output_hidden_states=True)
            hook.remove()
            states = [last["x"][0] if i == LAYERS else out.hidden_states[i][0] for i in layer_ids]
            found = Capture(list(ids), torch.stack(states, 1), int(out.logits[0, -1].argmax()))
            altered = self.alter(found, len(self.captured)) if self.alter else found
            self.captured.append(list(ids))
            if altered is not None:
                yield altered

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        raise NotImplementedError

    def serve(self, requests: Sequence[GenerationRequest], sampling: Sampling, draft: Path | None, k: int) -> Served:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        pass


class Make:
    """Calls the stage with a tiny engine."""

    def __init__(self, model: LlamaForCausalLM, target: Path, samples: Path, patch: pytest.MonkeyPatch) -> None:
        self.model, self.target, self.samples, self._patch = model, target, samples, patch

    def __call__(self, folder: Path, engine: TinyEngine | None = None, **settings: Any) -> dict[str, Any]:
        live = engine or TinyEngine(self.model)
        self._patch.setattr(capture, "open_engine", lambda *_: live)
        folder.mkdir(exist_ok=True)
        return capture.make(
            HiddenStatesSettings(**{"shards": 2, **settings}),
            EngineSettings(),
            MachineSettings(threads=2),
            target=self.target,
            samples=self.samples,
            folder=folder,
        )


@pytest.fixture
def make(model: LlamaForCausalLM, target: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return Make(model, target, samples, monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    """The artifact's files: all that do not begin with a dot."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
