"""The demo prompts: enough of them, well formed, and no two alike."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.prompts import PromptsSettings, SourceSettings
from eagle3.stages.prompts import make as make_prompts

FOLDER = Path(__file__).parents[1] / "resources" / "prompts"
KINDS = {"chat", "code", "extraction", "multi-turn", "reasoning", "summarising", "translation"}


def conversations() -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (kind, messages) of every prompt."""
    return [
        (path.stem, json.loads(line)["messages"])
        for path in sorted(FOLDER.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def words(messages: list[dict[str, Any]]) -> list[str]:
    """Return the words of a conversation: case, punctuation and spacing do not count."""
    return re.findall(r"\w+", " ".join(message["content"] for message in messages).casefold())


def test_there_are_enough_prompts_of_every_kind() -> None:
    kinds = [kind for kind, _ in conversations()]
    assert set(kinds) == KINDS
    assert len(kinds) >= 400
    assert min(kinds.count(kind) for kind in KINDS) >= 40


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.stem)
def test_lines_are_objects_with_messages_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    for line in text.splitlines():
        value = json.loads(line)
        assert set(value) == {"messages"}
        assert all(set(message) == {"role", "content"} for message in value["messages"])
        assert all(message["content"] == message["content"].strip() != "" for message in value["messages"])


def test_a_system_message_comes_first_if_at_all_and_users_follow() -> None:
    turns: dict[str, set[int]] = {}
    for kind, messages in conversations():
        roles = [message["role"] for message in messages]
        users = roles[1:] if roles[0] == "system" else roles
        assert users
        assert set(users) == {"user"}
        turns.setdefault(kind, set()).add(len(users))
    assert turns.pop("multi-turn") == {2, 3}
    assert all(counts == {1} for counts in turns.values())


def test_no_two_prompts_are_the_same_or_nearly_so() -> None:
    texts = [words(messages) for _, messages in conversations()]
    assert len({tuple(text) for text in texts}) == len(texts)
    # The shared system messages are a shape; what the user says must differ.
    shingles = [
        {tuple(said[i : i + 3]) for i in range(max(1, len(said) - 2))}
        for said in (words([m for m in messages if m["role"] == "user"]) for _, messages in conversations())
    ]
    alike = [
        (" ".join(texts[a]), " ".join(texts[b]))
        for a, b in itertools.combinations(range(len(texts)), 2)
        if len(shingles[a] & shingles[b]) > 0.4 * len(shingles[a] | shingles[b])
    ]
    assert alike == []


@pytest.mark.parametrize("kind", ["extraction", "summarising"])
def test_passages_are_short_enough_for_a_small_target(kind: str) -> None:
    for found, messages in conversations():
        if found == kind:
            task, passage = messages[-1]["content"].split("\n\n", 1)
            assert task
            assert 40 <= len(passage.split()) <= 120


def test_the_readme_counts_every_file() -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    counted = {name: int(count) for name, count in re.findall(r"`([\w-]+)\.jsonl` \| (\d+)", readme)}
    kinds = [kind for kind, _ in conversations()]
    assert counted == {kind: kinds.count(kind) for kind in KINDS}
    assert f"\n{len(kinds)} prompts" in readme


def test_the_prompts_stage_takes_every_one(tmp_path: Path) -> None:
    settings = PromptsSettings(sources=[SourceSettings(path=str(FOLDER / "*.jsonl"))])
    counts = make_prompts(settings, sources=sorted(FOLDER.glob("*.jsonl")), folder=tmp_path)
    conversation_turns = [len([m for m in messages if m["role"] == "user"]) for _, messages in conversations()]
    assert counts["prompts"] == len(conversation_turns)
    assert counts["turns"] == sum(conversation_turns)
    assert counts["rejects"] == {}
