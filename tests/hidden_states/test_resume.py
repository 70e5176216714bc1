"""Killed, starved of disk, or damaged: a capture resumes where it was and gives the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.errors import Eagle3Error
from eagle3.hidden_states.capture_log import CaptureLog, read_provenance, scan
from eagle3.hidden_states.shard import Shard
from tests.hidden_states.conftest import Make, TinyEngine, contents

ROOT = Path(__file__).parents[2]


def run(make: Make, *runs: tuple[Path, int, int, int]) -> tuple[list[int], str]:
    """Run captures (folder, batch size, kill after, limit of a file's size); return exit codes and messages."""
    arguments = [str(make.target), str(make.samples), *(",".join(map(str, one)) for one in runs)]
    command = [sys.executable, "-m", "tests.hidden_states.killed", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [int(code) for code in done.stdout.split()], done.stderr


def kept(folder: Path) -> int:
    """Return how many samples the logs hold."""
    return sum(len(list(scan(log, 3))) for log in (folder / ".capture").glob("*.log"))


@pytest.mark.slow
def test_killed_again_and_again_the_bytes_are_the_same(make: Make, tmp_path: Path) -> None:
    runs: list[tuple[Path, int, int, int]] = []
    for batch in (0, 4):
        calm, killed = tmp_path / f"calm{batch}", tmp_path / f"killed{batch}"
        runs += [(calm, batch, -1, -1), *((killed, batch, after, -1) for after in (0, 7, 5, 6, -1))]
    codes, message = run(make, *runs)
    assert codes == [0, *[-signal.SIGKILL] * 4, 0] * 2, message
    for batch in (0, 4):
        assert contents(tmp_path / f"killed{batch}") == contents(tmp_path / f"calm{batch}")
    shards = [(tmp_path / name / "shard-0.safetensors").read_bytes() for name in ("calm0", "calm4")]
    assert shards[0] != shards[1]  # so the batches did matter


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_keeps_what_is_finished(make: Make, tmp_path: Path) -> None:
    codes, message = run(make, (tmp_path / "work", 0, -1, 200_000))
    assert codes != [0]
    assert "File too large" in message
    found = kept(tmp_path / "work")
    assert 0 < found < 22
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    assert len(engine.captured) <= 22 - found
    make(tmp_path / "calm")
    assert contents(tmp_path / "work") == contents(tmp_path / "calm")


def test_finished_samples_are_not_captured_again(make: Make, tmp_path: Path) -> None:
    def stop(found, number):  # type: ignore[no-untyped-def]
        if number == 12:
            raise RuntimeError("the server died")
        return found

    with pytest.raises(RuntimeError, match="the server died"):
        make(tmp_path / "work", TinyEngine(make.model, alter=stop))
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    assert len(engine.captured) == 21 - 12


def test_a_batch_with_a_missing_sample_is_computed_as_a_whole(make: Make, tmp_path: Path) -> None:
    def stop(found, number):  # type: ignore[no-untyped-def]
        if number == 13:
            raise RuntimeError("the server died")
        return found

    first = TinyEngine(make.model, batch_size=4, alter=stop)
    with pytest.raises(RuntimeError):
        make(tmp_path / "work", first)
    second = TinyEngine(make.model, batch_size=4)
    make(tmp_path / "work", second)
    assert second.captured[0] == first.captured[12]
    assert len(second.captured) == 21 - 12
    lengths = [len(ids) for ids in first.captured[:12] + second.captured]
    assert lengths == sorted(lengths, reverse=True)


def interrupted(make: Make, folder: Path) -> Path:
    """Capture all but one sequence, and return the fuller log."""

    def stop(found, number):  # type: ignore[no-untyped-def]
        if number == 20:
            raise RuntimeError("the server died")
        return found

    with pytest.raises(RuntimeError):
        make(folder, TinyEngine(make.model, alter=stop))
    return max((folder / ".capture").glob("*.log"), key=lambda log: log.stat().st_size)


def test_a_log_is_good_up_to_wherever_it_is_cut(make: Make, tmp_path: Path) -> None:
    whole = interrupted(make, tmp_path / "work")
    provenance = read_provenance(whole.parent)
    assert provenance is not None
    ends = {stored.id: stored.offset + stored.size for stored in scan(whole, 3)}
    assert len(ends) > 5
    cut = tmp_path / "cut.log"
    for size in [*range(0, whole.stat().st_size, 4999), *ends.values()]:
        cut.write_bytes(whole.read_bytes()[:size])
        log = CaptureLog(cut, provenance.part, 3)
        log.close()
        complete = {sample: end for sample, end in ends.items() if end <= size}
        assert list(log.samples) == list(complete)
        assert cut.stat().st_size == max(complete.values(), default=0)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_a_damaged_record_costs_one_sample(make: Make, tmp_path: Path, share: float) -> None:
    log = interrupted(make, tmp_path / "work")
    data = bytearray(log.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    log.write_bytes(data)
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    assert len(engine.captured) == 2
    make(tmp_path / "calm")
    assert contents(tmp_path / "work") == contents(tmp_path / "calm")


def test_a_damaged_shard_is_rebuilt_and_the_others_stay(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work")
    before = contents(tmp_path / "work")
    path = tmp_path / "work" / "shard-1.safetensors"
    other = (tmp_path / "work" / "shard-0.safetensors").stat()
    samples = Shard(path).ids
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    assert len(engine.captured) == len(samples) - ("twin-1" in samples and "s03-0" in samples)
    assert contents(tmp_path / "work") == before
    assert (tmp_path / "work" / "shard-0.safetensors").stat().st_mtime_ns == other.st_mtime_ns


def test_another_version_of_the_engine_is_refused(make: Make, tmp_path: Path) -> None:
    interrupted(make, tmp_path / "work")
    engine = TinyEngine(make.model)
    engine.versions = {"tiny": "2"}
    with pytest.raises(Eagle3Error, match="started with a different engine") as caught:
        make(tmp_path / "work", engine)
    assert "{'tiny': '2'}" in str(caught.value)
    assert "{'tiny': '1'}" in str(caught.value)


def test_nothing_left_to_capture_needs_no_engine(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work")
    before = contents(tmp_path / "work")
    engine = TinyEngine(make.model)
    make(tmp_path / "work", engine)
    assert not engine.captured
    assert contents(tmp_path / "work") == before
