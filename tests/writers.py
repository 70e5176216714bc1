"""A tiny target that has learned to write user turns."""

from __future__ import annotations

import shutil
from pathlib import Path

VERBS = ("describe", "draw", "count", "find", "explain", "compare")
THINGS = ("the old bridge", "a green hill", "the sea", "three colours", "the moon", "a stone")
ENDS = ("in one line", "for a child", "and say why", "twice", "with care", "at last")
TURNS = [f"{verb} {thing} {end}" for verb in VERBS for thing in THINGS for end in ENDS]


def teach(target: Path, folder: Path, steps: int = 60) -> Path:
    """Copy a target to `folder` and tune it on `TURNS`, so that most of what it samples are turns like them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chats = [[{"role": "user", "content": turn}] for turn in TURNS]
    rows = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = torch.randint(len(TURNS), (32,))
        batch = {"input_ids": rows["input_ids"][chosen], "attention_mask": rows["attention_mask"][chosen]}
        loss = model(**batch, labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    return folder
