"""`eagle3 show`: records in the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.chat.template import load_chat
from eagle3.cli.show import show_records
from eagle3.errors import Eagle3Error
from eagle3.files.records import write_records
from eagle3.target.pin import load_target
from tests.engines.targets import make_tokenizer, pin_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with a target, two samples and a reject."""
    chat = load_chat(load_target(pin_tokenizer(tmp_path / "target", make_tokenizer())))
    prompt = chat.render([{"role": "user", "content": "How many baskets?"}])
    samples = []
    for number, content in enumerate(("Seven", "Eight")):
        ids = prompt + chat.encode([f"some apples</think>{content}<|im_end|>"])[0]
        spans = [[len(prompt), len(ids)]]
        samples.append({"id": f"{number:016x}-0", "source": "s", "input_ids": ids, "spans": spans, "off_policy": True})
    part = tmp_path / "samples" / "part-0"
    part.mkdir(parents=True)
    write_records(part / "samples.jsonl.zst", samples)
    write_records(part / "rejects.jsonl.zst", [{"id": "x", "reason": "empty", "detail": "no content"}])
    return tmp_path


def test_one_sample_by_its_id(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "samples" / "part-0" / "samples.jsonl.zst"
    show_records(file, sample=f"{1:016x}-0", target=None, count=3)
    shown = capsys.readouterr().out
    assert "some apples</think>Eight<|im_end|>" in shown
    assert "Seven" not in shown
    assert "off-policy" in shown
    assert "system  user  tool  history  reasoning  answer  special" in shown


def test_data_does_not_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = load_chat(load_target(run / "target" / "target.json"))
    file = run / "samples" / "part-0" / "odd.jsonl.zst"
    ids = chat.encode(["\x1b[2J\x9b31m\r\x7fa\tb\n[bold]c<|im_end|>"])[0]
    write_records(file, [{"id": "x", "source": "[/red]", "input_ids": ids, "spans": [[1, len(ids)]]}])
    show_records(file, sample=None, target=None, count=1)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\r", "\x7f"} & set(shown)
    assert "␛[2J" in shown
    assert "[bold]c" in shown
    assert "[/red]" in shown


def test_the_first_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = run / "samples" / "part-0"
    show_records(part / "samples.jsonl.zst", sample=None, target=None, count=3)
    assert {"Seven", "Eight"} <= set(capsys.readouterr().out.replace("</think>", " ").replace("<|", " ").split())
    show_records(part / "rejects.jsonl.zst", sample=None, target=None, count=3)
    assert "no content" in capsys.readouterr().out


def test_an_unknown_id_and_a_file_far_from_its_target(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = run / "samples" / "part-0" / "samples.jsonl.zst"
    with pytest.raises(Eagle3Error, match=r"(?s)no such record.*found:\s+y"):
        show_records(file, sample="y", target=None, count=3)
    alone = tmp_path_factory.mktemp("alone") / file.name
    alone.write_bytes(file.read_bytes())
    with pytest.raises(Eagle3Error, match=r"add --target"):
        show_records(alone, sample=None, target=None, count=3)
    show_records(alone, sample=None, target=run / "target" / "target.json", count=1)
