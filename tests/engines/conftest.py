"""Tiny targets and drafts, made in seconds: random weights, real formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from eagle3.target import Target

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|tool_begin|>", "<|tool_end|>"]
TEXT = ["the quick brown fox jumps over the lazy dog", "how many apples are left in the basket today", "0123456789"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}<|tool_begin|>{{ call['function']['name'] }} "
    "{{ call['function']['arguments'] }}<|tool_end|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a small byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = TEMPLATE
    return fast


def save_target(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Target:
    """Save a model as a target folder; `config` is added to its config.json."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | config
    path.write_text(json.dumps(values))
    eos = [tokenizer.eos_token_id]
    return Target(path=folder, revision="test", config=values | {"eagle3_eos_token_ids": eos}, trust_remote_code=False)


def make_llama(folder: Path) -> Target:
    """Make a Llama-type target of 8 layers: random, but with peaked predictions so that greedy choices are clear."""
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
    """Make a DeepSeek-V3-type target: MLA in the only sizes that vLLM's CPU kernels know, two expert layers."""
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
        initializer_range=0.1,
    )
    model = DeepseekV3ForCausalLM(config)
    # transformers 5.19 leaves these two out; vLLM reads the router's kind from them.
    return save_target(folder, model, tokenizer, topk_method="noaux_tc", scoring_func="sigmoid")


def make_draft(folder: Path, target: Target) -> Path:
    """Make a random one-layer Llama-type draft in the plain export format."""
    torch.manual_seed(1)
    H, V, inner = target.hidden_size, target.vocab_size, 256
    shapes = {
        "fc.weight": (H, 3 * H),
        "layers.0.self_attn.q_proj.weight": (H, 2 * H),
        "layers.0.self_attn.k_proj.weight": (H // 2, 2 * H),
        "layers.0.self_attn.v_proj.weight": (H // 2, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, H),
        "layers.0.mlp.gate_proj.weight": (inner, H),
        "layers.0.mlp.up_proj.weight": (inner, H),
        "layers.0.mlp.down_proj.weight": (H, inner),
        "lm_head.weight": (V, H),
    }
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm")
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(H) for name in norms}
    folder.mkdir()
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "vocab_size": V,
        "draft_vocab_size": V,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": list(target.aux_layer_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="session")
def draft(llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft") / "plain", llama)
