"""Parts, shares and repeated runs of the stage `prompts`."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.files.records import read_json
from tests.prompts.rows import many, part_bytes, parts, run

# What a user may write: anything but nothing, NULs and halves of surrogate pairs.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)


class TestParts:
    def test_one_more_prompt_changes_one_part(self, tmp_path: Path) -> None:
        texts = [f"question {number}" for number in range(100)]
        run(tmp_path / "x", many(tmp_path / "a.jsonl", texts), parts=5)
        run(tmp_path / "y", many(tmp_path / "a.jsonl", [*texts, "another"]), parts=5)
        changed = [a != b for a, b in zip(part_bytes(tmp_path / "x"), part_bytes(tmp_path / "y"), strict=True)]
        assert sum(changed) == 1
        assert read_json(tmp_path / "x" / "stats.json")["parts"] != read_json(tmp_path / "y" / "stats.json")["parts"]

    def test_more_parts_than_prompts_gives_empty_ones(self, tmp_path: Path) -> None:
        run(tmp_path / "out", many(tmp_path / "a.jsonl", ["a", "b"]), parts=7)
        assert len(list((tmp_path / "out").glob("part-*"))) == 7
        assert len(parts(tmp_path / "out")) == 2

    @given(texts=st.lists(st.text(min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=30), data=st.data())
    @settings(max_examples=40)
    def test_the_order_of_rows_does_not_matter_and_every_row_is_counted(
        self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
    ) -> None:
        tmp_path = tmp_path_factory.mktemp("parts")
        shuffled = data.draw(st.permutations(texts))
        for name, order in (("x", texts), ("y", shuffled)):
            (tmp_path / name).mkdir()
            many(tmp_path / name / "a.jsonl", order)
        if all("\0" in text for text in texts):
            return
        first = run(tmp_path / "x", tmp_path / "x" / "a.jsonl", parts=3, duplicates="exact")
        second = run(tmp_path / "y", tmp_path / "y" / "a.jsonl", parts=3, duplicates="exact")
        assert part_bytes(tmp_path / "x") == part_bytes(tmp_path / "y")
        assert first == second
        assert first["rows"] == len(texts) == first["prompts"] + sum(first["rejects"].values())


class TestShares:
    TEXTS = tuple(f"question {number}" for number in range(200))

    def test_limit_takes_the_same_ones_whatever_else_there_is(self, tmp_path: Path) -> None:
        source = {"path": str(many(tmp_path / "a.jsonl", self.TEXTS)), "limit": 20}
        other = many(tmp_path / "b.jsonl", [f"other {number}" for number in range(50)])
        counts = run(tmp_path / "x", source)
        assert counts["prompts"] == 20
        assert counts["not taken"] == 180
        run(tmp_path / "y", source, other)
        taken = {record["id"] for record in parts(tmp_path / "x")}
        assert taken == {record["id"] for record in parts(tmp_path / "y") if record["source"] == "a"}
        run(tmp_path / "z", {**source, "limit": 40})
        assert taken < {record["id"] for record in parts(tmp_path / "z")}

    def test_weight_keeps_a_share_and_the_seed_chooses(self, tmp_path: Path) -> None:
        source = {"path": str(many(tmp_path / "a.jsonl", self.TEXTS)), "weight": 0.3}
        counts = [run(tmp_path / str(seed), source, seed=seed)["prompts"] for seed in range(4)]
        assert all(30 < count < 90 for count in counts)
        assert len({tuple(record["id"] for record in parts(tmp_path / str(seed))) for seed in range(4)}) == 4


def test_a_second_run_in_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    source = many(tmp_path / "a.jsonl", ["a", "b", "A"])
    run(tmp_path / "out", source)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")}
    (tmp_path / "out" / "part-0.jsonl.zst").unlink()
    (tmp_path / "out" / ".rejects.jsonl.zst.tmp").write_bytes(b"torn")
    run(tmp_path / "out", source)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")} == before
