"""Every kind of damage, in the file or at the capture, is found and named."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle3.engines.base import Capture
from eagle3.errors import Eagle3Error
from eagle3.files.records import Record, read_records, write_records
from eagle3.hidden_states.verify import Report, verify
from eagle3.target.pin import Target, load_target
from eagle3.target.weights import head_weights
from tests.hidden_states.conftest import Make, TinyEngine
from tests.hidden_states.test_resume import interrupted
from tests.stages.test_hidden_states import normed

anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)


@pytest.fixture
def work(make: Make, tmp_path: Path) -> Path:
    make(tmp_path / "work")
    return tmp_path / "work"


def tensor_offsets(data: bytearray) -> dict[str, int]:
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    return {name: begin + one["data_offsets"][0] for name, one in header.items() if name != "__metadata__"}


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change a shard's tensors and bring the checksum of the index up to date, as a faulty writer would."""
    data = bytearray(path.read_bytes())
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    change(tensors)
    offsets = tensor_offsets(data)
    for name, array in tensors.items():
        data[offsets[name] : offsets[name] + array.nbytes] = array.tobytes()
    at, stop = offsets["checksum"], offsets["token_ids"]
    data[at : at + 8] = np.int64(zlib.crc32(data[at + 8 : stop], zlib.crc32(data[:at]))).tobytes()
    path.write_bytes(data)


def faults(report: Report) -> set[tuple[str, str]]:
    return {(fault.check, fault.sample) for fault in report.faults}


def test_a_sound_capture_has_no_faults(make: Make, work: Path) -> None:
    target = load_target(make.target)
    report = verify([work], target=target, head=head_weights(target), engine=TinyEngine(make.model), samples=22)
    assert report.ok, report.faults
    assert (report.files, report.samples) == (2, 22)
    assert report.teacher_agreement == 1
    assert report.response_agreement is not None
    assert report.response_agreement > 0.8
    assert list(report.parity) == [2, 4, 5, 8]
    assert max(report.parity.values()) < 0.01
    assert [row["layer"] for row in report.layers] == [2, 4, 5, 8]
    assert all(0.6 < row["bytes_per_bf16_byte"] < 0.75 for row in report.layers)


@anything
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_any_flipped_byte_is_found(work: Path, at: int, flip: int) -> None:
    data = bytearray((work / "shard-0.safetensors").read_bytes())
    # Half of the flips in header and index, which are small.
    limit = len(data) if at % 2 else tensor_offsets(data)["frames"]
    data[at // 2 % limit] ^= flip
    path = work / "flipped" / "shard-0.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    shutil.copy(work / "shard-1.safetensors", path.parent)
    report = verify([path.parent])
    assert {fault.file for fault in report.faults} == {str(path)}


@anything
@given(st.integers(0, 10**9))
def test_a_cut_anywhere_is_found(work: Path, at: int) -> None:
    data = (work / "shard-1.safetensors").read_bytes()
    path = work / "cut.safetensors"
    path.write_bytes(data[: at % len(data)])
    report = verify([path])
    assert [fault.file for fault in report.faults] == [str(path)]
    assert report.faults[0].check in ("truncated", "header")


def test_two_samples_with_each_others_states(work: Path) -> None:
    path = work / "shard-0.safetensors"
    names: list[str] = []

    def swap(t: dict[str, np.ndarray]) -> None:
        lines = t["sample_ids"].tobytes().rstrip(b"\0").split(b"\n")[:-1]
        names.extend(line.decode() for line in lines[1:3])
        lines[1], lines[2] = lines[2], lines[1]
        t["sample_ids"][: len(b"\n".join(lines))] = np.frombuffer(b"\n".join(lines), np.uint8)

    rewrite(path, swap)
    assert faults(verify([work])) == {("tokens", name) for name in names}


def test_two_samples_with_each_others_frames(make: Make, work: Path, records: list[Record], tmp_path: Path) -> None:
    # Two of one length, so that frames fit; a writer that mixed up everything but the ids.
    twins = [
        {**records[4], "id": name, "input_ids": [i, *records[4]["input_ids"][1:]]} for i, name in ((7, "a"), (8, "b"))
    ]
    write_records(make.samples, twins)
    make(tmp_path / "pair", shards=1)
    path = tmp_path / "pair" / "shard-0.safetensors"

    def swap(t: dict[str, np.ndarray]) -> None:
        ends = t["frame_byte_end"]
        frames = [t["frames"][a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        half = len(frames) // 2
        for name in ("frame_packed_bytes", "frame_checksum"):
            t[name][:] = np.roll(t[name], half)
        frames = frames[half:] + frames[:half]
        t["frames"][:] = np.concatenate(frames)
        ends[:] = np.cumsum([len(frame) for frame in frames])

    rewrite(path, swap)
    report = verify([path])
    assert faults(report) == {("checksum", "a"), ("checksum", "b")}
    assert "these are the states of sample b" in next(fault.detail for fault in report.faults if fault.sample == "a")


def test_two_layers_in_each_others_place(work: Path) -> None:
    path = work / "shard-0.safetensors"
    names: list[str] = []

    def swap(t: dict[str, np.ndarray]) -> None:
        names.append(t["sample_ids"].tobytes().split(b"\n")[0].decode())
        ends, frames = t["frame_byte_end"], t["frames"]
        first, second = frames[: ends[0]].copy(), frames[ends[0] : ends[1]].copy()
        frames[: ends[1]] = np.concatenate([second, first])
        ends[0] = len(second)
        for name in ("frame_packed_bytes", "frame_checksum"):
            t[name][[0, 1]] = t[name][[1, 0]]

    rewrite(path, swap)
    report = verify([work])
    assert faults(report) == {("checksum", names[0])}
    assert "layer 2, tokens 0-" in report.faults[0].detail
    assert "these are layer 4, rows 0-" in report.faults[0].detail


def spoiled(make: Make, folder: Path, alter: Callable[[Capture, int], Capture]) -> Report:
    make(folder, TinyEngine(make.model, alter=alter), min_teacher_agreement=0)
    target = load_target(make.target)
    return verify([folder], target=target, head=head_weights(target), engine=TinyEngine(make.model), samples=22)


def test_engine_swapped_two_layers(make: Make, tmp_path: Path) -> None:
    report = spoiled(
        make, tmp_path / "work", lambda c, _: Capture(c.token_ids, c.states[:, [0, 2, 1, 3]], c.next_token)
    )
    assert {fault.check for fault in report.faults} == {"parity"}
    details = {fault.detail.split("; ")[1] for fault in report.faults}
    assert details == {"it equals layer 5", "it equals layer 4"}
    assert len(report.faults) == 2 * 22


def test_engine_dropped_the_last_layer(make: Make, tmp_path: Path) -> None:
    report = spoiled(
        make, tmp_path / "work", lambda c, _: Capture(c.token_ids, c.states[:, [0, 1, 2, 2]], c.next_token)
    )
    assert {fault.check for fault in report.faults} == {"teacher", "parity"}
    assert "teacher and engine agree on" in next(f.detail for f in report.faults if f.check == "teacher")


def test_engine_returned_states_after_the_norm(make: Make, tmp_path: Path) -> None:
    report = spoiled(make, tmp_path / "work", lambda c, _: normed(c, make.model))
    assert {fault.check for fault in report.faults} == {"teacher", "parity"}
    parity = [fault.detail for fault in report.faults if fault.check == "parity"]
    assert all("it equals layer 8 after the final norm" in detail for detail in parity)


def test_engine_shifted_rows(make: Make, tmp_path: Path) -> None:
    report = spoiled(make, tmp_path / "work", lambda c, _: replace(c, states=c.states.roll(1, 0)))
    assert {fault.check for fault in report.faults} >= {"teacher", "parity"}
    assert all("rows shifted by 1" in fault.detail for fault in report.faults if fault.check == "parity")


def test_engine_mixed_up_two_requests(make: Make, tmp_path: Path) -> None:
    inputs = [record["input_ids"] for record in read_records(make.samples)]
    of_length = {len(one.token_ids): one for one in TinyEngine(make.model).capture(inputs, (2, 4, 5, 8))}

    def alter(found: Capture, _: int) -> Capture:
        other = of_length.get({50: 53, 53: 50}.get(len(found.token_ids), 0))
        if other is None:
            return found
        n = len(found.token_ids)
        states = other.states.repeat(2, 1, 1)[len(other.states) * 2 - n :]
        return Capture(found.token_ids, states, other.next_token)

    report = spoiled(make, tmp_path / "work", alter)
    assert {fault.sample for fault in report.faults} == {"s06-0", "s07-0"}
    assert {fault.check for fault in report.faults} >= {"response", "parity"}


def test_another_target(make: Make, work: Path) -> None:
    target = load_target(make.target)
    other = replace(target, revision="sha256:two")
    report = verify([work], target=other)
    assert [fault.check for fault in report.faults] == ["target", "target"]
    assert "sha256:one" in report.faults[0].detail
    assert "sha256:two" in report.faults[0].detail
    # Another head under the same name is noticed as well.
    head = head_weights(target)
    swapped = replace(head, lm_head=head.lm_head.roll(1, 0))
    report = verify([work], target=target, head=swapped, samples=22)
    assert {fault.check for fault in report.faults} == {"teacher"}
    assert len(report.faults) == 22


def test_shards_of_two_runs(make: Make, work: Path, tmp_path: Path, records: list[Record]) -> None:
    write_records(make.samples, [{**record, "id": f"{record['id']}x"} for record in records])
    make(tmp_path / "second")
    make(tmp_path / "third", encoding="fp8")
    one, two = work / "shard-0.safetensors", tmp_path / "second" / "shard-1.safetensors"
    report = verify([one, two])
    assert [(fault.check, fault.file) for fault in report.faults] == [
        ("incomplete", str(one)),
        ("incomplete", str(two)),
    ]
    report = verify([one, tmp_path / "third" / "shard-1.safetensors"])
    assert {fault.check for fault in report.faults} == {"mixed", "incomplete"}
    assert "encoding is fp8, but lossless" in next(f.detail for f in report.faults if f.check == "mixed")
    shutil.copy(one, tmp_path / "again.safetensors")
    assert {fault.check for fault in verify([work, tmp_path / "again.safetensors"]).faults} == {"duplicate"}
    # Two parts, each complete, go together.
    assert verify([work, tmp_path / "second"]).ok


def test_a_capture_under_way(make: Make, tmp_path: Path) -> None:
    seen: list[Report] = []
    target: Target = load_target(make.target)

    def look(found: Capture, number: int) -> Capture:
        if number == 15:
            seen.append(verify([tmp_path / "work"], target=target, head=head_weights(target)))
        return found

    make(tmp_path / "work", TinyEngine(make.model, alter=look))
    (report,) = seen
    assert report.ok, report.faults
    assert 0 < report.samples < 22
    assert report.files == 2


def test_a_record_that_is_being_written(make: Make, tmp_path: Path) -> None:
    log = interrupted(make, tmp_path / "work")
    before = verify([tmp_path / "work"])
    assert before.ok
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 1)
    report = verify([tmp_path / "work"])
    assert report.ok
    assert report.samples == before.samples - 1


def test_a_damaged_log_of_a_capture_under_way(make: Make, tmp_path: Path) -> None:
    log = interrupted(make, tmp_path / "work")
    data = bytearray(log.read_bytes())
    data[-10] ^= 1
    log.write_bytes(data)
    report = verify([tmp_path / "work"])
    assert [fault.check for fault in report.faults] == ["checksum"]
    assert report.faults[0].file == str(log)


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no hidden states to verify"):
        verify([tmp_path])
