"""Artifacts of earlier code, declared valid under today's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eagle3.artifacts import accept as accepting
from eagle3.artifacts.accept import accept
from eagle3.artifacts.gc import free, unused
from eagle3.artifacts.manifest import Manifest, read
from eagle3.artifacts.store import Store
from eagle3.config.dataset import DatasetSettings
from eagle3.errors import Eagle3Error


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(accepting, "stage_fingerprint", lambda *_: "new")
    return Store(tmp_path / "results")


def produce(store: Store, run: str, fingerprint: str, **changes: Any) -> tuple[Manifest, bool]:
    def make(folder: Path) -> Mapping[str, Any]:
        (folder / "a.txt").write_text(run)
        return {"tokens": 3}

    return store.produce(
        "dataset",
        fingerprint=fingerprint,
        settings={"dataset": DatasetSettings(seed=len(run)).model_dump(mode="json") | changes},
        inputs={},
        output=store.results / run / "dataset",
        make=make,
        versions={},
    )


def test_an_accepted_artifact_is_adopted_and_says_who_accepted_it(store: Store) -> None:
    earlier, _ = produce(store, "a", "old")
    (done,) = accept(store, "dataset")
    assert done.outcome == "accepted"
    assert unused(store) == []
    found, adopted = produce(store, "a", "new")
    assert adopted
    (note,) = found.accepted
    assert (note.fingerprint, note.key) == ("old", earlier.key)
    assert note.at.endswith("+00:00")
    assert found.model_copy(update={"accepted": [], "key": earlier.key, "fingerprint": "old"}) == earlier
    assert read(store.results / "a/dataset") == found


def test_it_takes_no_space_and_outlives_the_earlier_key(store: Store) -> None:
    produce(store, "a", "old")
    accept(store, "dataset")
    files = list(store.entries.rglob("a.txt"))
    assert len({file.stat().st_ino for file in files}) == 1
    assert len(files) == 2
    produce(store, "a", "new")
    (row,) = unused(store)
    assert row.bytes < 1000
    free([row])
    assert produce(store, "a", "new")[1]
    assert (store.results / "a/dataset/a.txt").read_text() == "a"


def test_what_is_current_is_left_alone(store: Store) -> None:
    produce(store, "a", "new")
    before = sorted(store.entries.rglob("*"))
    assert [done.outcome for done in accept(store, "dataset")] == ["already current"]
    assert sorted(store.entries.rglob("*")) == before


def test_it_can_be_limited_to_one_run(store: Store) -> None:
    for run in ("a", "bb"):
        produce(store, run, "old")
    assert [done.folder.parent.name for done in accept(store, "dataset", "bb")] == ["bb"]
    assert not produce(store, "a", "new")[1]
    assert produce(store, "bb", "new")[1]


def test_settings_of_another_form_cannot_be_accepted(store: Store) -> None:
    """No run would look for that key."""
    produce(store, "a", "old", older=1)
    (done,) = accept(store, "dataset")
    assert done.refused
    assert "removed: older" in done.outcome
    assert len(list(store.entries.glob("*/*"))) == 1


def test_a_damaged_artifact_is_not_accepted(store: Store) -> None:
    produce(store, "a", "old")
    (store.results / "a/dataset/a.txt").write_text("b")
    with pytest.raises(Eagle3Error, match="a file of an artifact was altered"):
        accept(store, "dataset")


@pytest.mark.parametrize(("stage", "run"), [("nonsense", None), ("dataset", "nonsense")])
def test_a_wrong_name_is_refused(store: Store, stage: str, run: str | None) -> None:
    with pytest.raises(Eagle3Error, match="no such"):
        accept(store, stage, run)
