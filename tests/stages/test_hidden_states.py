"""The stage: right states under the right id, faults of engines noticed by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from eagle3.artifacts.fingerprint import closure
from eagle3.engines.base import Capture
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_json, write_records
from eagle3.hidden_states.capture_log import CaptureLog
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.hidden_states.stored_sample import Provenance
from eagle3.hidden_states.writer import CaptureSample, CaptureWriter
from tests.hidden_states.conftest import LAYERS, Alter, H, Make, TinyEngine, contents


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


@pytest.mark.parametrize("layers", [None, (0, 7), (5,)], ids=["three", "two", "one"])
def test_states_are_those_of_the_model(
    layers: tuple[int, ...] | None, make: Make, tmp_path: Path, records: list[Record]
) -> None:
    counts = make(tmp_path / "work", aux_layer_ids=layers)
    assert counts["samples"] == counts["stored"] == len(records)
    assert counts["tokens"] == sum(len(record["input_ids"]) for record in records)
    assert counts["teacher_agreement"] == 1
    reader = HiddenStateReader(shards(tmp_path / "work"))
    assert sorted(reader.ids) == sorted(record["id"] for record in records)
    engine = TinyEngine(make.model)
    for record in records:
        (expected,) = engine.capture([record["input_ids"]], (*(layers or (2, 4, 5)), LAYERS))
        found = reader.read(record["id"])
        assert found.token_ids.tolist() == record["input_ids"]
        assert found.token_ids.dtype == torch.int32
        rows = [row for start, end in record["spans"] for row in range(start - 1, end - 1)]
        assert found.last_rows.tolist() == rows
        assert torch.equal(found.aux, expected.states[:, :-1].bfloat16())
        assert torch.equal(found.last, expected.states[rows, -1].bfloat16())


def test_bytes_do_not_depend_on_the_order_of_arrival(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "other", TinyEngine(make.model, order=-1))
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert set(contents(tmp_path / "one")) == {"shard-0.safetensors", "shard-1.safetensors", "stats.json"}


def test_identical_sequences_are_captured_once(make: Make, tmp_path: Path, records: list[Record]) -> None:
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    twins = [record for record in records if record["input_ids"] == records[3]["input_ids"]]
    assert len(twins) == 2
    assert len(engine.captured) == len(records) - 1
    reader = HiddenStateReader(shards(tmp_path / "work"))
    one, other = (reader.read(record["id"]) for record in twins)
    assert torch.equal(one.aux, other.aux)
    assert other.last_rows.tolist() == list(range(3, 8))


FAULTS: dict[str, tuple[Alter, str]] = {
    "lost": (lambda found, _: None, "not returned"),
    "another's tokens": (lambda c, _: Capture([9, *c.token_ids[1:]], c.states, c.next_token), "not returned"),
    "rows": (lambda c, _: Capture(c.token_ids, c.states[:-1], c.next_token), "rows"),
    "a layer short": (lambda c, _: Capture(c.token_ids, c.states[:, :-1], c.next_token), "shape"),
    "nan": (lambda c, _: Capture(c.token_ids, c.states / 0, c.next_token), "not finite"),
    "integers": (lambda c, _: Capture(c.token_ids, c.states.int(), c.next_token), "dtype"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_fails_twice_is_listed(make: Make, tmp_path: Path, fault: str) -> None:
    spoil, reason = FAULTS[fault]

    def alter(found: Capture, number: int) -> Capture | None:
        return spoil(found, number) if len(found.token_ids) == 53 else found

    engine = TinyEngine(make.model, alter=alter)
    counts = make(tmp_path / "work", engine, max_failed=0.1)
    assert counts["failed"] == {reason: 1}
    assert counts["stored"] == counts["samples"] - 1
    (failure,) = read_json(tmp_path / "work" / "stats.json")["failures"]
    assert (failure["id"], failure["reason"]) == ("s07-0", reason)
    assert [len(ids) for ids in engine.captured].count(53) == 2
    with pytest.raises(Eagle3Error, match="too many samples") as caught:
        make(tmp_path / "strict", TinyEngine(make.model, alter=alter))
    assert f"s07-0 ({reason}" in str(caught.value)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_sample_that_fails_once_is_captured_again(make: Make, tmp_path: Path, batch_size: int | None) -> None:
    engine = TinyEngine(make.model, batch_size=batch_size, alter=lambda found, number: None if number == 5 else found)
    assert make(tmp_path / "work", engine)["failed"] == {}
    assert len(engine.captured) == 21 + (batch_size or 1)
    make(tmp_path / "calm", TinyEngine(make.model, batch_size=batch_size))
    assert contents(tmp_path / "work") == contents(tmp_path / "calm")


def normed(found: Capture, model: LlamaForCausalLM) -> Capture:
    states = found.states.clone()
    states[:, -1] = model.model.norm(states[:, -1])
    return Capture(found.token_ids, states, found.next_token)


def test_states_that_do_not_lead_to_the_engines_token_stop_the_run(
    make: Make, tmp_path: Path, records: list[Record]
) -> None:
    faults: dict[str, Alter] = {
        "the norm was applied already": lambda c, _: normed(c, make.model),
        "shifted by one": lambda c, _: Capture(c.token_ids, c.states.roll(1, 0), c.next_token),
        "layers swapped": lambda c, _: Capture(c.token_ids, c.states[:, [0, 1, 3, 2]], c.next_token),
        "another request's token": lambda c, n: Capture(c.token_ids, c.states, (c.next_token + 1) % 200),
    }
    for number, alter in enumerate(faults.values()):
        with pytest.raises(Eagle3Error, match="do not lead to the tokens") as caught:
            make(tmp_path / f"work{number}", TinyEngine(make.model, alter=alter))
        named = {record["id"] for record in records if record["id"] in str(caught.value)}
        assert len(named) == 5
        assert not shards(tmp_path / f"work{number}")


def test_engines_in_half_precision_and_wrong_order_of_memory(make: Make, tmp_path: Path) -> None:
    def alter(found: Capture, _: int) -> Capture:
        states = (found.states / 64).half().transpose(0, 1).contiguous().transpose(0, 1)
        return Capture(found.token_ids, states, found.next_token)

    counts = make(tmp_path / "work", TinyEngine(make.model, alter=alter), min_teacher_agreement=0.8)
    assert counts["engine_dtype"] == "float16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": [[5, 900]]}, "spans are outside its tokens"),
        ({"input_ids": []}, "not in the target's vocabulary"),
        ({"input_ids": [1, 5000]}, "not in the target's vocabulary"),
        ({"id": "s01-0"}, "duplicate sample id"),
    ],
)
def test_invalid_samples_are_refused(
    make: Make, tmp_path: Path, records: list[Record], change: Record, message: str
) -> None:
    write_records(make.samples, [*records, {**records[2], "id": "new", **change}])
    with pytest.raises(Eagle3Error, match=message) as caught:
        make(tmp_path / "work")
    assert change.get("id", "new") in str(caught.value)


def test_no_samples_and_wrong_layers_are_refused(make: Make, tmp_path: Path) -> None:
    for layers in ((2, 2, 5), (5, 4, 2), (2, 4, 8)):
        with pytest.raises(Eagle3Error, match="not layers of the target"):
            make(tmp_path / "work", aux_layer_ids=layers)
    write_records(make.samples, [])
    with pytest.raises(Eagle3Error, match="no samples to capture"):
        make(tmp_path / "work")


def test_an_edit_of_reading_or_verifying_captures_nothing_again() -> None:
    covered = {definition.module for definition in closure(["eagle3.stages.hidden_states:make"])}
    assert "eagle3.hidden_states.codec" in covered
    assert not covered & {"eagle3.hidden_states.reader", "eagle3.hidden_states.verify", "eagle3.cli.verify"}


class SlowLog(CaptureLog):
    """A log whose disk waits for `go`."""

    go = threading.Event()

    def append(self, *arguments: Any) -> None:
        self.go.wait(60)
        super().append(*arguments)


def test_a_slow_disk_holds_the_engine_back(tmp_path: Path) -> None:
    provenance = Provenance("part", "sha256:one", (0, 1, 2, 3), H, "lossless", "tiny", "bfloat16", {})
    log = SlowLog(tmp_path / "log", provenance.part, 3)
    states = np.zeros((100, 4, H), np.uint16)
    handed_over: list[int] = []
    with CaptureWriter({0: log}, threads=2, limit=3 * states.nbytes) as writer:

        def engine() -> None:
            for number in range(12):
                ids = np.arange(100, dtype=np.int32)
                writer.submit(CaptureSample(f"s{number}", ids, ids[-1:], 0), states, 0, provenance)
                handed_over.append(number)

        thread = threading.Thread(target=engine)
        thread.start()
        thread.join(0.5)
        assert len(handed_over) == 3
        log.go.set()
        thread.join(60)
        writer.drain()
    log.close()
    assert len(handed_over) == len(log.samples) == 12
    # A sample larger than the limit goes alone.
    with CaptureWriter({0: CaptureLog(tmp_path / "other", provenance.part, 3)}, threads=2, limit=1) as narrow:
        narrow.submit(
            CaptureSample("big", np.arange(100, dtype=np.int32), np.array([99], np.int32), 0), states, 0, provenance
        )
        narrow.drain()
