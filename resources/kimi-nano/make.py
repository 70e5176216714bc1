"""Make kimi-nano: a thinking target with Kimi-K2.5's architecture in 10 MB.

    python resources/kimi-nano/make.py

A DeepSeek-V3 model (multi-head latent attention, routed and shared experts) with Kimi's special tokens and a chat
template that behaves like Kimi's. It answers short questions, and reasons first. With it, everything specific to the
flagship target can be run and tested on a laptop. The result is in `model/`, next to this script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import orjson
import torch
from tasks import Exchange, conversations, prompts
from template import CLOSE, END_OF_TURN, make_tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from eagle3.console import Progress

SEED = 0
STEPS, BATCH, LEARNING_RATE, WARMUP = 800, 16, 3e-3, 20
# Share of the turns that are answered without reasoning (`thinking: false`).
_INSTANT = 0.15

Example = tuple[list[int], list[int]]
"""ids of the prompt, and of the answer that the model learns"""


def make(folder: Path) -> None:
    """Train the model and write it into `folder`: config, tokenizer, chat template and weights in bf16."""
    torch.manual_seed(SEED)
    texts = [text for conversation in islice(conversations(SEED), 2000) for turn in conversation for text in turn]
    tokenizer = make_tokenizer(texts)
    model = _model(tokenizer)
    _train(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    # What transformers leaves out and vLLM reads: which kind of router it is.
    config = orjson.loads(path.read_bytes()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n")


def _model(tokenizer: PreTrainedTokenizerFast) -> DeepseekV3ForCausalLM:
    """Return the untrained model; sizes of the latent attention are Kimi's, and the only ones vLLM has for CPUs."""
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.04,
    )
    return DeepseekV3ForCausalLM(config)


def _train(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Teach the tasks: cross entropy on the answers; the learning rate rises, then falls to 0."""
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, _rate) for optimizer in optimizers]
    examples = _examples(tokenizer)
    model.train()
    with Progress(STEPS, "kimi-nano", "steps") as bar:
        for _ in range(STEPS):
            ids, labels = _batch(list(islice(examples, BATCH)), tokenizer.pad_token_id)
            loss = model(input_ids=ids, attention_mask=ids != tokenizer.pad_token_id, labels=labels).loss
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            bar.update(1, f"loss {loss.item():.3f}")
    model.eval()


def _optimizers(model: DeepseekV3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which then learn to copy from the question in far fewer steps; AdamW for the rest."""
    # Embeddings and routers do not map states to states; the largest matrix would cost more than the whole model.
    plain = {"embed_tokens", "lm_head", "gate", "kv_b_proj"}
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        chosen = matrices if weight.ndim == 2 and plain.isdisjoint(name.split(".")) else others
        chosen.append(weight)
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95)),
    ]


def _rate(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))


def _examples(tokenizer: PreTrainedTokenizerFast) -> Iterator[Example]:
    """Yield turns in their context, as the template renders it for generation."""
    random = Random(SEED)
    for conversation in conversations(SEED):
        messages: list[dict[str, Any]] = []
        for exchange in conversation:
            thinking = random.random() >= _INSTANT
            messages.append({"role": "user", "content": exchange.question})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, thinking=thinking
            )
            yield prompt, tokenizer.encode(_written(exchange, thinking), add_special_tokens=False)
            messages.append({"role": "assistant", "content": exchange.answer})


def _written(exchange: Exchange, thinking: bool) -> str:
    reasoning = exchange.reasoning + CLOSE if thinking else ""
    return reasoning + exchange.answer + END_OF_TURN


def _batch(examples: Sequence[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, both [B, longest]; prompts and padding carry no loss."""
    ids = [torch.tensor(prompt + written) for prompt, written in examples]
    labels = [torch.tensor([-100] * len(prompt) + written) for prompt, written in examples]
    return pad_sequence(ids, True, pad), pad_sequence(labels, True, -100)


if __name__ == "__main__":
    here = Path(__file__).parent
    make(here / "model")
    lines = [orjson.dumps(prompt) for prompt in prompts(SEED + 1, 240)]
    (here / "prompts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
