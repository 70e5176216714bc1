"""A target small enough for every test: a random Llama with a tokenizer of its own, made once per session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

# Workers of one test run share the cores: more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine is not a failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Files whose tests start a real vLLM.
REAL_VLLM_FILES = ("test_vllm_", "test_kimi_nano")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "the cat sat on a mat and looked at the moon while rain fell over green hills near the old stone bridge; "
    "write a short poem about the sea, add two numbers, list three colours, say hello to Ada, 12 + 30 = 42? "
) * 8


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that `build` fills once per test run; the workers of pytest-xdist share it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, built = base / name, base / f"{name}.built"
    with FileLock(base / f"{name}.lock"):
        if not built.exists():
            # What a failed attempt left behind.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            built.touch()
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep all tests with a real vLLM on one worker, so that one server runs at a time; spread the others singly.

    pytest-xdist's own `xdist_group` has no effect under pytest 9.2, where a test's id cannot be changed.
    """
    from xdist.scheduler import LoadScopeScheduling

    class VllmTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.split("::")[0]).name
            return "vllm" if file.startswith(REAL_VLLM_FILES) else nodeid

    return VllmTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow tests first, so that no worker is left with a long one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random 8-layer Llama (H 64, V 320), its tokenizer and chat template."""
    return build_once(tmp_path_factory, "tiny-target", save_tiny_target)


def save_tiny_target(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
