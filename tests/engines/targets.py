"""Tiny targets, made in a second: real formats, tokenizers and templates, random weights."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from eagle3.files.records import write_json
from eagle3.target.pin import Target

# Kimi's names, so that vLLM's own parsers for Kimi read what these targets write.
SPECIAL = (
    *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
REASONING = "some apples are red, others green"
PLAN = "must look outside first"
CONTENT = "Seven baskets stand here!"
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
# As Kimi's: a finished conversation has its reasoning blanked. `plan` and `call` make the scripted target call a tool.
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{% if message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}"
    "{% if message.get('tool_calls') %}<|tool_calls_section_begin|>{% for call in message['tool_calls'] %}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{% set arguments = call['function']['arguments'] %}"
    "{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{% if plan %}<think>\n{% elif call %}{% elif thinking is defined and not thinking %}<think></think>"
    "{% else %}<think>{% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a small byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [REASONING, PLAN, CONTENT, "functions.weather:0", '{"city": "Paris"}', "user assistant system"]
    tokenizer.train_from_iterator(texts * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def save_target(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Target:
    """Save a model as a target folder; `config` is added to its config.json."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | config
    path.write_text(json.dumps(values))
    eos = [tokenizer.eos_token_id]
    return Target(path=folder, revision="test", config=values | {"eagle3_eos_token_ids": eos}, trust_remote_code=False)


def pin_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Pin a target that is a tokenizer and nothing else, for stages that read no weights; return its target.json."""
    tokenizer.save_pretrained(folder / "model")
    config = {"vocab_size": len(tokenizer), "eagle3_eos_token_ids": [tokenizer.eos_token_id]}
    pin = {"path": "model", "revision": "x", "config": config, "trust_remote_code": False}
    write_json(folder / "target.json", pin)
    return folder / "target.json"


def make_llama(folder: Path) -> Target:
    """Make a Llama-type target of 8 layers with random weights, wide enough apart for clear predictions."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    return save_target(folder, LlamaForCausalLM(config), tokenizer)


def make_deepseek(folder: Path) -> Target:
    """Make a DeepSeek-V3-type target: MLA in the only sizes that vLLM's CPU kernels know, a dense layer, three MoE."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        # Wide enough for attention, and with it the rotation, to matter.
        initializer_range=0.1,
    )
    # transformers 5.19 leaves these two out; vLLM reads the router's kind from them.
    return save_target(folder, DeepseekV3ForCausalLM(config), tokenizer, topk_method="noaux_tc", scoring_func="sigmoid")


def make_scripted(folder: Path) -> Target:
    """Make a Llama-type target that writes set pieces: reasoning and an answer, an answer, a plan and a call, a call.

    Every token has one successor. Its layers add nothing, embeddings are orthogonal, and a row of lm_head is the sum
    of the embeddings of the token's predecessors.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    V, H = len(tokenizer), 512
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    embedding = torch.linalg.qr(torch.randn(H, H))[0][:V]  # [V, H], orthonormal rows
    head = torch.zeros(V, H)
    for token, successor in _successors(tokenizer).items():
        head[successor] += embedding[token]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return save_target(folder, model, tokenizer)


def _successors(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Return the one successor of every token in the texts, which share no token except where they meet."""
    successors: dict[int, int] = {}
    pieces = (f"<think>{REASONING}</think>{CONTENT}<|im_end|>", f"\n{PLAN}{CALL}<|im_end|>", f"<|im_middle|>{CALL}")
    for piece in pieces:
        for token, successor in pairwise(tokenizer.encode(piece, add_special_tokens=False)):
            assert successors.setdefault(token, successor) == successor, tokenizer.decode([token])
    return successors
