"""The store: computed once, adopted forever, never lost by accident."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3.artifacts import manifest
from eagle3.artifacts.gc import free, unused
from eagle3.artifacts.manifest import Manifest
from eagle3.artifacts.store import Store
from eagle3.errors import Eagle3Error


class Bench:
    """A store with one two-stage workflow: `upper` reads what `lower` wrote."""

    def __init__(self, results: Path) -> None:
        self.store = Store(results)
        self.run = results / "run"
        self.computed: list[str] = []

    def lower(self, text: str = "abc", **changes: Any) -> tuple[Manifest, bool]:
        def make(folder: Path) -> Mapping[str, Any]:
            self.computed.append("lower")
            (folder / "a.txt").write_text(text)
            (folder / ".notes").write_text("scratch")
            return {"characters": len(text)}

        return self.produce("lower", {}, make, {"text": text} | changes)

    def upper(self, **changes: Any) -> tuple[Manifest, bool]:
        source = self.run / "lower/a.txt"

        def make(folder: Path) -> Mapping[str, Any]:
            self.computed.append("upper")
            (folder / "b.txt").write_text(source.read_text().upper())
            return {}

        return self.produce("upper", {"text": [source]}, make, changes)

    def produce(
        self, stage: str, inputs: Any, make: Callable[[Path], Mapping[str, Any]], settings: dict[str, Any]
    ) -> tuple[Manifest, bool]:
        return self.store.produce(
            stage,
            fingerprint="f",
            settings=settings,
            inputs=inputs,
            output=self.run / stage,
            make=make,
            versions={},
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "results")


@pytest.mark.parametrize("moment", ["listing", "reading"])
def test_another_job_may_unlink_a_stale_manifest_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Two jobs of one run end at the same time, and both find the same manifest stale."""
    bench.lower()
    bench.upper()
    parse, stale = manifest.parse, bench.run / "upper" / manifest.NAME

    def raced(path: Path) -> Manifest:
        if path == stale and moment == "listing":
            stale.unlink()
        found = parse(path)
        if path == stale:
            stale.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(manifest, "parse", raced)
    bench.lower("other")
    assert not stale.exists()
    assert (bench.run / "lower/a.txt").read_text() == "other"


def test_a_second_time_is_adopted(bench: Bench) -> None:
    first, adopted = bench.lower()
    assert not adopted
    again, adopted = bench.lower()
    assert adopted
    assert again == first
    assert bench.computed == ["lower"]
    assert (bench.run / "lower/a.txt").read_text() == "abc"
    assert not (bench.run / "lower/.notes").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_files_have_the_usual_mode_whatever_library_wrote_them(bench: Bench, umask: int, mode: int) -> None:
    """On a shared machine others read the artifacts; a library's temporary file is its owner's alone."""

    def make(folder: Path) -> Mapping[str, Any]:
        save_file({"a": np.zeros(2)}, folder / "a.safetensors")
        (folder / "b").mkdir()
        (folder / "b/c.txt").write_text("c")
        (folder / "b/c.txt").chmod(0o700)
        return {}

    before = os.umask(umask)
    try:
        bench.produce("lower", {}, make, {})
    finally:
        os.umask(before)
    files = ("a.safetensors", "b/c.txt", "manifest.json")
    assert [stat.S_IMODE((bench.run / "lower" / name).stat().st_mode) for name in files] == [mode] * 3


def test_going_back_computes_nothing(bench: Bench) -> None:
    for text in ("abc", "xyz", "abc"):
        bench.lower(text)
        bench.upper()
    assert bench.computed == ["lower", "upper", "lower", "upper"]
    assert (bench.run / "upper/b.txt").read_text() == "ABC"


def test_equal_bytes_stop_the_change(bench: Bench) -> None:
    bench.lower()
    bench.upper()
    _, adopted = bench.lower(unrelated=1)
    assert not adopted
    _, adopted = bench.upper()
    assert adopted


def test_what_was_made_from_other_bytes_loses_its_manifest(bench: Bench) -> None:
    """Otherwise a run that is stopped between two stages would look finished to Snakemake."""
    bench.lower()
    bench.upper()
    bench.lower("xyz")
    assert not (bench.run / "upper/manifest.json").exists()
    bench.lower("abc")
    bench.upper()
    assert bench.computed == ["lower", "upper", "lower"]


def test_snakemake_may_delete_outputs(bench: Bench) -> None:
    bench.lower()
    for path in (bench.run / "lower").iterdir():
        path.unlink()
    _, adopted = bench.lower()
    assert adopted
    assert (bench.run / "lower/a.txt").read_text() == "abc"


def test_a_failing_stage_leaves_the_earlier_generation(bench: Bench) -> None:
    first, _ = bench.lower()

    def fail(folder: Path) -> Mapping[str, Any]:
        (folder / "half.txt").write_text("half")
        raise Eagle3Error("no")

    with pytest.raises(Eagle3Error, match="no"):
        bench.produce("lower", {}, fail, {"text": "new"})
    assert (bench.store.entries / "lower" / first.key / "a.txt").read_text() == "abc"
    _, adopted = bench.lower()
    assert adopted


def test_a_manifest_left_by_a_killed_job_is_not_part_of_the_artifact(bench: Bench) -> None:
    def killed(folder: Path) -> Mapping[str, Any]:
        (folder / "a.txt").write_text("abc")
        (folder / manifest.NAME).write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.produce("lower", {}, killed, {"text": "abc"})
    made, _ = bench.lower()
    assert list(made.files) == ["a.txt"]
    bench.upper()


@pytest.mark.parametrize("damage", ["truncate", "alter", "delete"])
def test_a_damaged_input_is_named(bench: Bench, damage: str) -> None:
    bench.lower()
    path = bench.run / "lower/a.txt"
    if damage == "delete":
        path.unlink()
    else:
        path.write_text("ab" if damage == "truncate" else "abX")
    with pytest.raises(Eagle3Error) as caught:
        bench.upper()
    assert "lower/a.txt" in str(caught.value)


def test_a_damaged_artifact_is_rebuilt_after_deleting_it(bench: Bench) -> None:
    """The link and the store share the bytes, so the store must notice, too."""
    bench.lower()
    bench.upper()
    (bench.run / "lower/a.txt").write_text("abX")
    (bench.run / "lower/a.txt").unlink()
    _, adopted = bench.lower()
    assert not adopted
    assert (bench.run / "lower/a.txt").read_text() == "abc"
    _, adopted = bench.upper()
    assert adopted


def test_only_the_damaged_file_is_rebuilt(bench: Bench) -> None:
    def make(folder: Path) -> Mapping[str, Any]:
        for name in ("1.txt", "2.txt"):
            if not (folder / name).exists():
                bench.computed.append(name)
                (folder / name).write_text(name)
        return {}

    first, _ = bench.produce("lower", {}, make, {})
    (bench.run / "lower/2.txt").write_text("damaged")
    again, adopted = bench.produce("lower", {}, make, {})
    assert not adopted
    assert again.files == first.files
    assert bench.computed == ["1.txt", "2.txt", "2.txt"]


def test_a_file_that_no_stage_made_is_refused(bench: Bench) -> None:
    (bench.run / "lower").mkdir(parents=True)
    (bench.run / "lower/a.txt").write_text("mine")
    with pytest.raises(Eagle3Error, match="does not belong to a finished artifact"):
        bench.upper()


def test_two_jobs_for_one_key_compute_once(tmp_path: Path) -> None:
    """A job that outlived its Snakemake and its successor."""
    log = tmp_path / "log"

    def job() -> None:
        def make(folder: Path) -> Mapping[str, Any]:
            with log.open("a") as file:
                file.write("computed\n")
            time.sleep(0.5)
            (folder / "a.txt").write_text("a")
            return {}

        Bench(tmp_path / "results").produce("lower", {}, make, {})

    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=job) for _ in range(3)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join(30)
        assert process.exitcode == 0
    assert log.read_text() == "computed\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from eagle3.artifacts.store import Store

def make(folder):
    steps = folder / ".steps"
    with steps.open("a") as file:
        file.write("step\\n")
    if len(steps.read_text().splitlines()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "a.txt").write_text(steps.read_text())
    return {}

results = Path(sys.argv[1])
Store(results).produce(
    "lower", fingerprint="f", settings={}, inputs={}, output=results / "run/lower", make=make, versions={}
)
"""


def test_a_killed_stage_continues_in_its_work_folder(tmp_path: Path) -> None:
    codes = [subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert (tmp_path / "run/lower/a.txt").read_text() == "step\n" * 3


def test_a_full_disk_is_explained(bench: Bench) -> None:
    def make(folder: Path) -> Mapping[str, Any]:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "a.txt"))

    with pytest.raises(Eagle3Error, match="the disk is full") as caught:
        bench.produce("lower", {}, make, {})
    assert "eagle3 gc" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_results_are_explained(bench: Bench) -> None:
    bench.lower()
    bench.store.work.chmod(0o500)
    with pytest.raises(Eagle3Error, match="cannot be written"):
        bench.lower("new")


def test_gc_lists_what_nothing_refers_to_and_spares_what_is_used(bench: Bench) -> None:
    bench.lower()
    bench.upper()
    assert unused(bench.store) == []
    bench.lower("xyz")
    bench.upper()
    rows = unused(bench.store)
    assert sorted((row.path.parent.name, row.kind) for row in rows) == [("lower", "artifact"), ("upper", "artifact")]
    free(rows)
    assert unused(bench.store) == []
    _, adopted = bench.upper()
    assert adopted
    assert manifest.read(bench.run / "upper").stage == "upper"
