from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.config.dataset import DatasetSettings
from eagle3.errors import Eagle3Error
from eagle3.files.hashing import hash_of
from eagle3.files.records import Record, read_json, read_records, write_records
from eagle3.stages import dataset

FILES = ("train.jsonl.zst", "eval.jsonl.zst", "rejects.jsonl.zst")


def samples_of(source: str, conversations: int, turns: int = 2) -> list[Record]:
    return [
        {
            "id": f"{hash_of(source, number)}-{turn}",
            "conversation": hash_of(source, number),
            "source": source,
            "turn": turn,
            "input_ids": list(range(number % 7 + 5)),
            "spans": [[3, number % 7 + 5]],
            "finish_reason": "stop",
        }
        for number in range(conversations)
        for turn in range(turns)
    ]


def run(folder: Path, *parts: list[Record], **values: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"samples-{number}.jsonl.zst" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_records(path, part)
    return dataset.make(DatasetSettings.model_validate(values), samples=paths, folder=folder)


def split(folder: Path) -> tuple[list[Record], list[Record]]:
    train, evaluation = (list(read_records(folder / f"{name}.jsonl.zst")) for name in ("train", "eval"))
    return train, evaluation


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (*FILES, "stats.json")]


def test_every_sample_is_on_one_side_and_conversations_stay_whole(tmp_path: Path) -> None:
    given_samples = samples_of("a", 200)
    counts = run(tmp_path, given_samples)
    train, evaluation = split(tmp_path)
    assert sorted(record["id"] for record in train + evaluation) == sorted(record["id"] for record in given_samples)
    sides = [{record["conversation"] for record in side} for side in (train, evaluation)]
    assert not sides[0] & sides[1]
    assert 8 <= len(sides[1]) <= 35
    assert counts["eval conversations"] == len(sides[1])
    assert counts["train supervised tokens"] == sum(end - start for r in train for start, end in r["spans"])
    by_id = {record["id"]: record for record in given_samples}
    assert all(record == by_id[record["id"]] for record in train + evaluation)


def test_the_order_is_shuffled_and_the_seed_changes_order_and_split(tmp_path: Path) -> None:
    given_samples = samples_of("a", 100)
    run(tmp_path / "0", given_samples, seed=0)
    run(tmp_path / "1", given_samples, seed=1)
    (train, held), (other_train, other_held) = split(tmp_path / "0"), split(tmp_path / "1")
    both = {record["id"] for record in train} & {record["id"] for record in other_train}
    orders = [[record["id"] for record in side if record["id"] in both] for side in (train, other_train)]
    assert len(both) > 100
    assert orders[0] not in (sorted(both), orders[1])
    assert {record["conversation"] for record in held} != {record["conversation"] for record in other_held}


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), parts=st.integers(1, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_parts_and_their_order_change_no_byte(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], parts: int, data: st.DataObject
) -> None:
    everything = [record for number, size in enumerate(sizes) for record in samples_of(f"s{number}", size)]
    if sum(sizes) < 2:
        return
    shuffled = data.draw(st.permutations(everything))
    folders = [tmp_path_factory.mktemp("data") for _ in range(2)]
    run(folders[0], everything)
    run(folders[1], *(shuffled[start::parts] for start in range(parts)))
    assert content(folders[0]) == content(folders[1])


@given(size=st.integers(2, 40), other=st.integers(1, 40), fraction=st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_another_source_leaves_order_and_split_of_the_first(
    tmp_path_factory: pytest.TempPathFactory, size: int, other: int, fraction: float
) -> None:
    folders = [tmp_path_factory.mktemp("data") for _ in range(2)]
    run(folders[0], samples_of("a", size), eval_fraction=fraction)
    run(folders[1], samples_of("b", other), samples_of("a", size), eval_fraction=fraction)
    for alone, joined in zip(split(folders[0]), split(folders[1]), strict=True):
        assert alone == [record for record in joined if record["source"] == "a"]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_small_sources_have_both_sides(tmp_path: Path, fraction: float) -> None:
    run(tmp_path, samples_of("a", 2), samples_of("b", 3), samples_of("c", 1), eval_fraction=fraction)
    train, evaluation = split(tmp_path)
    assert {record["source"] for record in train} == {"a", "b", "c"}
    assert {record["source"] for record in evaluation} == {"a", "b"}


def test_sources_of_one_conversation_each_still_give_an_evaluation(tmp_path: Path) -> None:
    run(tmp_path, samples_of("a", 1), samples_of("b", 1))
    train, evaluation = split(tmp_path)
    assert len({record["conversation"] for record in train}) == 1
    assert len({record["conversation"] for record in evaluation}) == 1


@pytest.mark.parametrize("conversations", [0, 1])
def test_too_few_conversations_is_an_error_that_points_to_the_rejects(tmp_path: Path, conversations: int) -> None:
    with pytest.raises(Eagle3Error, match=rf"(?s)too few.*{conversations} with a clean sample.*rejects"):
        run(tmp_path, samples_of("a", conversations))


def test_a_duplicate_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"(?s)duplicate sample id.*-0"):
        run(tmp_path, samples_of("a", 5), samples_of("a", 1, turns=1))


def test_statistics_per_source(tmp_path: Path) -> None:
    run(tmp_path, samples_of("a", 20), samples_of("b", 10, turns=1))
    stats = read_json(tmp_path / "stats.json")
    assert stats["sources"]["a"]["conversations"] == 20
    assert stats["sources"]["b"]["train samples"] + stats["sources"]["b"]["eval samples"] == 10
    assert stats["total"]["conversations"] == 30


def test_what_a_killed_run_left_does_not_matter(tmp_path: Path) -> None:
    run(tmp_path / "a", samples_of("a", 30))
    folder = tmp_path / "b"
    (folder / ".spool").mkdir(parents=True)
    (folder / ".spool" / "00").write_bytes(b"torn")
    (folder / "train.jsonl.zst").write_bytes(b"from before")
    run(folder, samples_of("a", 30))
    assert content(tmp_path / "a") == content(folder)


class TestDuplicates:
    """Equal answers of a source, above a length."""

    def samples(self, source: str, answers: list[list[int]]) -> list[Record]:
        found = samples_of(source, len(answers), turns=1)
        for number, (record, answer) in enumerate(zip(found, answers, strict=True)):
            record |= {"input_ids": [1, number, *answer], "spans": [[2, 2 + len(answer)]]}
        return found

    def test_one_stays_whatever_the_order_and_the_parts(self, tmp_path: Path) -> None:
        answers = [[number % 5] * 40 for number in range(20)]
        everything = self.samples("a", answers)
        contents = []
        for name, parts in (("x", [everything]), ("y", [everything[::-1][:7], everything[::-1][7:]])):
            counts = run(tmp_path / name, *parts)
            contents.append(content(tmp_path / name))
        assert contents[0] == contents[1]
        assert counts["rejects"] == {"duplicate_response": 15}
        assert counts["rows"] == 20 == counts["train samples"] + counts["eval samples"] + 15
        kept = {record["id"]: record["input_ids"][2] for side in split(tmp_path / "x") for record in side}
        assert sorted(kept.values()) == [0, 1, 2, 3, 4]
        for reject in read_records(tmp_path / "x" / "rejects.jsonl.zst"):
            first = min(
                record["id"] for record in everything if record["input_ids"][2:] == reject["record"]["input_ids"][2:]
            )
            assert (reject["reason"], reject["detail"]) == ("duplicate_response", f"as {first}")
            assert kept[first] == reject["record"]["input_ids"][2]
            assert reject["id"] > first

    def test_short_ones_may_be_the_same(self, tmp_path: Path) -> None:
        everything = self.samples("a", [[7] * 31] * 4 + [[8] * 31 + [9]] * 3)
        assert run(tmp_path, everything)["rejects"] == {"duplicate_response": 2}
        assert run(tmp_path, everything, duplicate_tokens=33)["rejects"] == {}

    def test_another_source_changes_nothing(self, tmp_path: Path) -> None:
        one, other = (self.samples(source, [[number] * 40 for number in range(20)]) for source in "ab")
        run(tmp_path / "x", one)
        counts = run(tmp_path / "y", one, other)
        assert counts["rejects"] == {}
        for before, after in zip(split(tmp_path / "x"), split(tmp_path / "y"), strict=True):
            assert before == [record for record in after if record["source"] == "a"]

    def test_a_conversation_left_without_a_sample_is_not_held_out(self, tmp_path: Path) -> None:
        counts = run(tmp_path, self.samples("a", [[7] * 40] * 30 + [[8] * 40]), eval_fraction=0.9)
        assert (counts["conversations"], counts["train samples"], counts["eval samples"]) == (2, 1, 1)
