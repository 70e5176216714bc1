"""Prompts that repeat evaluation prompts are found, as a slow search over all n-grams finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.config.prompts import DecontaminationSettings, PromptsSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json, read_records
from eagle3.prompts.contamination import Contamination, words_of
from eagle3.stages import prompts
from tests.prompts.rows import write

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def contamination(path: Path, *rows: object, **values: Any) -> Contamination:
    write(path / "eval.jsonl", *rows)
    return Contamination(DecontaminationSettings(paths=[str(path / "*.jsonl")], **values))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't  stop,\nnow!", ["don", "t", "stop", "now"]),
        ("ＦＵＬＬ Straße", ["full", "strasse"]),
        ("为什么 GPU?", ["为", "什", "么", "gpu"]),
        ("مرحبا 👩‍👩‍👧", ["مرحبا"]),
        ("...", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


class TestFind:
    def test_case_punctuation_and_surroundings_do_not_hide_a_repetition(self, tmp_path: Path) -> None:
        found = contamination(tmp_path, {"prompt": QUESTION}).find(
            ["Solve this:\n\nNATALIA sold clips to 48 of her friends -- in april and, then she sold a few more."]
        )
        assert found == "13 words of eval.jsonl: natalia sold clips to 48 of her friends in april and then she"

    def test_one_word_less_is_not_a_repetition(self, tmp_path: Path) -> None:
        search = contamination(tmp_path, {"prompt": QUESTION})
        assert search.find(["x " + " ".join(words_of(QUESTION)[:12]) + " y"]) is None
        assert search.find(["x " + " ".join(words_of(QUESTION)[:13]) + " y"])

    def test_a_short_evaluation_prompt_rejects_only_its_equals(self, tmp_path: Path) -> None:
        search = contamination(tmp_path, {"prompt": "What is 2 + 2?"})
        assert search.find(["what is 2+2"]) == "equals a prompt of eval.jsonl"
        assert search.find(["What is 2 + 2, and why?"]) is None

    def test_an_evaluation_prompt_without_words_rejects_nothing(self, tmp_path: Path) -> None:
        assert contamination(tmp_path, {"prompt": "..."}).find(["?!"]) is None

    def test_every_turn_of_both_sides_counts(self, tmp_path: Path) -> None:
        search = contamination(tmp_path, {"turns": ["a first turn", "a second turn"]})
        assert search.find(["something else", "A second turn."])

    @given(
        known=st.lists(st.text("abc ", max_size=30), max_size=6),
        asked=st.text("abcd ", max_size=40),
        ngram=st.integers(1, 5),
    )
    @settings(max_examples=200, deadline=None)
    def test_it_agrees_with_a_search_over_all_ngrams(
        self, tmp_path_factory: pytest.TempPathFactory, known: list[str], asked: str, ngram: int
    ) -> None:
        rows = [{"q": text} for text in known]
        search = contamination(tmp_path_factory.mktemp("search"), *rows, column="q", ngram=ngram)
        words = words_of(asked)
        expected = False
        for other in map(words_of, known):
            if len(other) < ngram:
                expected |= bool(other) and words == other
                continue
            padded = " ".join(["", *words, ""])
            grams = [other[start : start + ngram] for start in range(len(other) - ngram + 1)]
            expected |= any(" ".join(["", *gram, ""]) in padded for gram in grams)
        assert (search.find([asked]) is not None) == expected


class TestEvaluationFiles:
    def test_rows_of_no_known_form_name_the_setting(self, tmp_path: Path) -> None:
        with pytest.raises(Eagle3Error, match=r"(?s)eval\.jsonl, line 1.*keys: question.*decontaminate\.column"):
            contamination(tmp_path, {"question": "a"})
        assert contamination(tmp_path, {"question": "a"}, column="question").find(["A"])

    def test_a_column_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(Eagle3Error, match=r"(?s)line 2.*no text under `question`"):
            contamination(tmp_path, {"question": "a"}, {"problem": "b"}, column="question")

    def test_a_missing_file_names_its_setting(self, tmp_path: Path) -> None:
        with pytest.raises(Eagle3Error, match=r"(?s)matches no file.*`prompts\.decontaminate\.paths`"):
            Contamination(DecontaminationSettings(paths=[str(tmp_path / "none.jsonl")]))


def test_the_stage_rejects_and_counts_per_source(tmp_path: Path) -> None:
    clean = write(tmp_path / "clean.jsonl", {"turns": ["a question of my own"]})
    dirty = write(tmp_path / "dirty.jsonl", {"turns": ["another one"]}, {"turns": ["Tell me.", f"Well: {QUESTION}"]})
    bench = write(tmp_path / "bench.jsonl", {"prompt": QUESTION}, {"prompt": "short"})
    chosen = PromptsSettings.model_validate(
        {"sources": [{"path": str(clean)}, {"path": str(dirty)}], "decontaminate": {"paths": [str(bench)]}}
    )
    assert chosen.outside_files() == [clean, dirty, bench]
    (tmp_path / "out").mkdir()
    counts = prompts.make(chosen, sources=[clean, dirty, bench], folder=tmp_path / "out")
    assert counts["prompts"] == 2
    assert counts["rejects"] == {"contaminated": 1}
    assert read_json(tmp_path / "out" / "stats.json")["sources"]["dirty"]["rejects"] == {"contaminated": 1}
    [reject] = read_records(tmp_path / "out" / "rejects.jsonl.zst")
    assert reject["id"] == "dirty.jsonl:2"
    assert reject["detail"].startswith("13 words of bench.jsonl: natalia sold")
