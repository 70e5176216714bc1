"""The report: drawn from what the stages write, and robust to what they leave out."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import numpy as np
import orjson
import pytest
from docutils.core import publish_parts  # type: ignore[import-untyped]

from eagle3.acceptance.figures import GenerationCounts, acceptance_figures
from eagle3.chat.template import load_chat
from eagle3.config.dataset import DatasetSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import write_json, write_records
from eagle3.report import figures
from eagle3.stages import report
from eagle3.stages.dataset import make as make_dataset
from eagle3.target.pin import load_target
from tests.engines.targets import make_tokenizer, pin_tokenizer

SOURCES = ("chat", "code", "extraction", "multi-turn", "reasoning", "summarising", "translation")
CAPTIONS = Path(__file__).parents[2] / "workflow" / "report"
DRAFTS = 3
Reported = tuple["Run", Path, dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """The inputs of a report, as `report.make` takes them."""

    target: Path
    train: Path
    training_log: Path
    draft_metrics: Path
    acceptance: tuple[Path, ...]
    prompts_stats: Path
    samples_stats: tuple[Path, ...]
    dataset_stats: Path
    vocabulary_stats: Path
    hidden_states_stats: tuple[Path, ...]

    def report(self, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        return report.make(**vars(self), folder=folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run like the demo, with figures a real one might have."""
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Return such a run, the folder of its report, and what the report counted."""
    folder = tmp_path_factory.mktemp("reported")
    run = write_run(folder / "run")
    return run, folder / "report", run.report(folder / "report")


def write_run(files: Path) -> Run:
    files.mkdir()
    acceptance = (files / "simulated.json", files / "served.json")
    figures = acceptance_figures(drafted(1, SOURCES), DRAFTS)
    measured = {"kind": "simulated", "engine": None, **figures, "on_served_prompts": figures}
    write_json(acceptance[0], measured)
    speed = {"with_draft": 61.5, "without_draft": 41.0}
    served = {"engine": {"name": "vllm", "vllm": "0.32.0"}, "prompts": 48, "identical_outputs": 47 / 48}
    speeds = {"tokens_per_second": speed, "milliseconds_per_token": {"with_draft": 16.5, "without_draft": 24.5}}
    sampled = {"temperature": 0.7, **acceptance_figures(drafted(3, SOURCES[:-1]), DRAFTS), **speeds}
    measured = {
        "kind": "served",
        **served,
        **acceptance_figures(drafted(2, SOURCES[:-1]), DRAFTS),
        **speeds,
        "sampled": sampled,
    }
    write_json(acceptance[1], measured)
    parts = (files / "samples-0.json", files / "samples-1.json")
    for part in parts:
        write_json(part, samples_stats({"repetition": 9, "too_short": 3, "no_end_of_turn": 1}))
    prompts = {source: {"rows": 12, "prompts": 11, "rejects": {"empty_message": 1}} for source in SOURCES}
    write_json(files / "prompts.json", {"sources": prompts})
    write_json(files / "vocabulary.json", vocabulary_stats())
    lengths = {"acceptance_length": 2.08, "expected_acceptance_length": 2.05}
    write_json(files / "metrics.json", {"steps": 600, "skipped_steps": 0, **lengths})
    write_json(files / "states.json", {"stored": 500, "failed": {}, "bytes": 4e8, "teacher_agreement": 0.998})
    write_log(files / "log.jsonl", 600)
    return Run(
        write_target(files),
        write_train(files),
        files / "log.jsonl",
        files / "metrics.json",
        acceptance,
        files / "prompts.json",
        parts,
        dataset_stats(files),
        files / "vocabulary.json",
        (files / "states.json",),
    )


def drafted(seed: int, sources: tuple[str, ...]) -> list[GenerationCounts]:
    """Return verification steps whose drafts are kept in 75%, 65% and 55% of the cases, less for later sources."""
    random = np.random.default_rng(seed)
    entries = []
    for index, source in enumerate(sources):
        kept = np.array([0.75, 0.65, 0.55]) - 0.03 * index
        accepted = [int(random.binomial(400, share)) for share in np.cumprod(kept)]
        entries.append(GenerationCounts(source, 400, sorted(accepted, reverse=True)))
    return entries


def samples_stats(rejects: dict[str, int]) -> dict[str, Any]:
    kept = 240
    names = [SOURCES[number % len(SOURCES)] for number in range(kept)]
    sources = {
        source: {
            "rows": names.count(source),
            "samples": names.count(source),
            "tokens": 900,
            "generated": 300,
            "rejects": {},
        }
        for source in SOURCES
    }
    sources["code"] |= {"rows": names.count("code") + sum(rejects.values()), "rejects": rejects, "off_policy": 20}
    return {
        "sources": sources,
        "total": {"off_policy": 20, "rows": kept + sum(rejects.values()), "samples": kept, "rejects": rejects},
        "lengths": {
            "prompt": {"16": 6, "32": 80, "64": 85, "128": 20, "256": 49},
            "reasoning": {"0": kept},
            "answer": {"8": 7, "16": 11, "32": 22, "64": 40, "128": 160},
        },
    }


def write_target(files: Path) -> Path:
    return pin_tokenizer(files, make_tokenizer())


def write_train(files: Path) -> Path:
    """Write samples of a target that thinks; the first source gives most of them."""
    chat = load_chat(load_target(files / "target.json"))
    records = []
    for number in range(40):
        source = SOURCES[max(0, number - 30) % len(SOURCES)]
        asked = [
            {"role": "system", "content": "Be brief & kind."},
            {"role": "user", "content": f"{number} < {source}?"},
        ]
        history = [{"role": "assistant", "content": "It depends."}, {"role": "user", "content": "Well?"}]
        prompt = chat.render(asked + history)
        answer = chat.encode([f"some apples are red</think>Seven baskets{' and more' * 900}!<|im_end|>"])[0]
        record = {
            "id": f"{number:016x}-1",
            "source": source,
            "input_ids": prompt + answer,
            "off_policy": source == "code",
        }
        records.append(record | {"spans": [[len(prompt), len(prompt) + len(answer)]]})
    write_records(files / "train.jsonl.zst", records)
    return files / "train.jsonl.zst"


def vocabulary_stats() -> dict[str, Any]:
    shares = dict(zip(SOURCES, (0.991, 0.972, 0.983, 0.989, 0.994, 0.987, 0.951), strict=True))
    return {"size": 8192, "coverage": 0.9847, "sources": shares}


def dataset_stats(folder: Path) -> Path:
    """Let the dataset stage itself make its stats."""
    records = [
        {"id": f"{i:016x}-0", "conversation": f"{i:016x}", "source": source, "input_ids": [1] * 9, "spans": [[4, 9]]}
        for i, source in enumerate(SOURCES * 10)
    ]
    write_records(folder / "samples.jsonl.zst", records)
    made = folder / "dataset"
    made.mkdir()
    make_dataset(DatasetSettings(), samples=[folder / "samples.jsonl.zst"], folder=made)
    return made / "stats.json"


def write_log(path: Path, steps: int) -> None:
    """Write a log as the training does: a line every ten steps, an evaluation every hundred."""
    random = np.random.default_rng(0)
    lines = []
    for step in range(10, steps + 1, 10):
        learned = 1 - math.exp(-step / 150)
        loss = [2.2 + 0.3 * t + 4.5 * (1 - learned) + random.normal(0, 0.1) for t in range(4)]
        conditional = [(0.7 - 0.06 * t) * learned + random.normal(0, 0.01) for t in range(4)]
        line = {"kind": "train", "step": step, "loss": loss, "conditional": conditional}
        gradient = {"grad_norm": 20 * (1.1 - learned), "learning_rate": 1e-3 * (1 - step / steps), "skipped_steps": 0}
        lines.append(line | gradient)
        if step % 100 == 0:
            length = 1 + 1.1 * learned - (0.1 if step == 600 else 0)
            lines.append({"kind": "evaluation", "step": step, "acceptance_length": length})
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))


def texts(svg: Path) -> list[str]:
    """Return what can be read in a figure."""
    return [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text") if element.text]


def test_every_figure_and_the_summary_are_written_whole_and_small(reported: Reported) -> None:
    _, folder, counts = reported
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [report.SUMMARY, report.SAMPLES, *(f"{name}.svg" for name in report.FIGURES)]
    )
    assert all(path.stat().st_size < 150_000 for path in folder.iterdir())
    assert all("no figures" not in texts(folder / f"{name}.svg") for name in report.FIGURES)
    assert counts["speed-up"] == pytest.approx(1.5)


def test_the_same_inputs_give_the_same_bytes_whatever_a_kill_left(reported: Reported, tmp_path: Path) -> None:
    run, folder, _ = reported
    (tmp_path / "training.svg").write_text("<svg")
    report.make(**vars(run), folder=tmp_path)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_titles_say_what_is_seen(reported: Reported) -> None:
    run, folder, _ = reported
    simulated, served = (orjson.loads(path.read_bytes()) for path in run.acceptance)
    positions = texts(folder / "acceptance_positions.svg")
    kinds = {"simulated": simulated, "served": served, "sampled": served["sampled"]}
    title = ", ".join(f"{found['acceptance_length']:.2f} {kind}" for kind, found in kinds.items())
    assert f"Acceptance length {title}" in positions
    assert "26 of 506 generations rejected (5.1%)" in texts(folder / "rejects.svg")
    assert "8,192 draft tokens cover 98.47% of the generated tokens" in texts(folder / "coverage.svg")
    assert {"Prompt: half have at most 64 tokens", "Answer: half have at most 128 tokens"} <= set(
        texts(folder / "lengths.svg")
    )
    assert "Held-out acceptance length: 2.06 at its best, after step 500" in texts(folder / "training.svg")
    assert "Gradient and learning rate: no step skipped" in texts(folder / "training.svg")
    # There was no reasoning, so there is no panel for it.
    assert not any(text.startswith("Reasoning") for text in texts(folder / "lengths.svg"))


def test_skipped_steps_and_outliers_of_the_gradient_are_seen(run: Run, tmp_path: Path) -> None:
    """A log too long to be drawn line by line; the gradient of a skipped step has no norm."""
    write_log(run.training_log, 3000)
    lines = [orjson.loads(line) for line in run.training_log.read_bytes().splitlines()]
    for line in lines:
        if line["kind"] == "train":
            norms = {1000: None, 2000: 5e4}
            line |= {"grad_norm": norms.get(line["step"], 2.0), "skipped_steps": 2 * (line["step"] >= 1000)}
    run.training_log.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    run.report(tmp_path / "report")
    drawn = texts(tmp_path / "report" / "training.svg")
    assert "Gradient and learning rate: 2 steps skipped (×)" in drawn
    assert {"2,000", "10000"} <= set(drawn)  # the axes reach that far
    train = [line for line in lines if line["kind"] == "train"]
    columns = ("step", "loss", "conditional", "grad_norm", "learning_rate", "skipped_steps")
    steps, loss, conditional, *gradient = ([line[name] for line in train] for name in columns)
    panel = figures.training(steps, loss, conditional, [], *gradient).axes[3]
    band, crosses = panel.collections
    assert np.asarray(band.get_paths()[0].vertices).max() == pytest.approx(5e4)
    assert np.asarray(crosses.get_offsets())[:, 0] == pytest.approx([1000], abs=15)


def test_parts_are_added_up(reported: Reported) -> None:
    _, folder, _ = reported
    assert {"18", "6", "2"} <= set(texts(folder / "rejects.svg"))
    assert "320" in texts(folder / "lengths.svg")


def test_a_source_that_was_not_served_is_still_drawn(run: Run, tmp_path: Path) -> None:
    served = orjson.loads(run.acceptance[1].read_bytes())
    assert SOURCES[-1] not in served["per_source"]
    served["per_source"]["chat"] = {"acceptance_length": None, "steps": 0}
    write_json(run.acceptance[1], served)
    run.report(tmp_path / "report")
    assert set(SOURCES) <= set(texts(tmp_path / "report" / "acceptance_sources.svg"))


def test_without_a_single_measurement_the_figures_say_so(run: Run, tmp_path: Path) -> None:
    write_log(run.training_log, 0)
    for path in run.samples_stats:
        empty = {"rows": 0, "samples": 0, "rejects": {}}
        write_json(path, {"sources": {}, "total": empty, "lengths": {"answer": {}}})
    write_json(run.vocabulary_stats, {"size": 320, "coverage": 1.0, "sources": {}})
    folder = tmp_path / "report"
    replace(run, acceptance=()).report(folder)
    for name in set(report.FIGURES) - {"rejects"}:
        assert "no figures" in texts(folder / f"{name}.svg"), name
    assert "nothing was rejected" in texts(folder / "rejects.svg")


def test_drafts_that_were_never_reached_have_no_bar_label(run: Run, tmp_path: Path) -> None:
    found = {"kind": "simulated", **acceptance_figures([GenerationCounts("chat", 10, [0, 0, 0])], DRAFTS)}
    assert found["per_position"] == [0.0, None, None]
    write_json(run.acceptance[0], found)
    replace(run, acceptance=run.acceptance[:1]).report(tmp_path / "report")
    shares = [text for text in texts(tmp_path / "report" / "acceptance_positions.svg") if text == "0%"]
    assert len(shares) == 2  # the axis and the first position


def test_the_summary_stands_alone_and_escapes_what_it_quotes(run: Run, tmp_path: Path) -> None:
    served = orjson.loads(run.acceptance[1].read_bytes())
    served["engine"] = {"name": "<script>", "vllm": "0.32.0"}
    write_json(run.acceptance[1], served)
    run.report(tmp_path / "report")
    page = (tmp_path / "report" / report.SUMMARY).read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|<img", page)
    rows = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", page))
    assert rows["speed-up"] == "1.500"
    assert rows["generations rejected"] == "26"
    total = orjson.loads(run.dataset_stats.read_bytes())["total"]
    assert rows["training tokens"] == str(total["train tokens"])
    assert rows["agreement with the engine&#x27;s own next token"] == "0.998"


def grid(page: str, caption: str) -> dict[str, dict[str, str]]:
    """Return a table of the summary: row -> heading -> text."""
    table = page.partition(f"<caption>{caption}</caption>")[2].partition("</table>")[0]
    headings = re.findall(r"<th>(.*?)</th>", table)[1:]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", table)]
    return {name: dict(zip(headings, values, strict=True)) for name, *values in rows}


def test_every_source_has_its_counts_and_reasons(reported: Reported) -> None:
    _, folder, _ = reported
    page = (folder / report.SUMMARY).read_text(encoding="utf-8")
    sources = grid(page, "Sources")
    assert list(sources) == sorted(SOURCES)
    expected = {"rows": "12", "prompts": "11", "off-policy": "40", "tokens": "1,800", "supervised": "0.333"}
    assert {name: sources["code"][name] for name in expected} == expected
    assert sources["code"]["covered"] == "0.972"
    kept = [Counter(SOURCES[number % len(SOURCES)] for number in range(240))[name] for name in ("code", "chat")]
    assert [sources[name]["answers"] for name in ("code", "chat")] == [str(2 * (kept[0] + 13)), str(2 * kept[1])]
    reasons = grid(page, "Rejected, by stage and reason")
    assert reasons["samples: repetition"] == {**dict.fromkeys(SOURCES, ""), "code": "18", "total": "18"}
    assert reasons["prompts: empty_message"]["total"] == "7"


def test_ten_samples_of_all_sources_are_coloured_by_role(reported: Reported) -> None:
    _, folder, _ = reported
    page = (folder / report.SAMPLES).read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|<img", page)
    shown = re.findall(r"<h2>(.*?)</h2>\n<pre>(.*?)</pre>", page, flags=re.DOTALL)
    assert len(shown) == 10
    assert {source for source in SOURCES if any(f" · {source} · " in heading for heading, _ in shown)} == set(SOURCES)
    assert {"off-policy" in heading for heading, _ in shown if "· code ·" in heading} == {True}
    spans = re.findall(r'<span class="([^"]*)">(.*?)</span>', shown[0][1])
    texts_by_role = {name: "".join(text for role, text in spans if role == name) for name, _ in spans}
    assert texts_by_role["system"] == "systemBe brief &amp; kind."
    assert "&lt; chat" in texts_by_role["user"]
    assert texts_by_role["history"].startswith("assistantIt depends.")
    assert texts_by_role["reasoning generated"] == "some apples are red"
    assert texts_by_role["special generated"] == "&lt;/think&gt;&lt;|im_end|&gt;"
    # The middle of a long text is left out, and said to be.
    assert re.search(r"Seven baskets and more.*\[… [\d,]+ characters …\].*and more!", shown[0][1])


def test_names_of_sources_are_not_read_as_formulas(run: Run, tmp_path: Path) -> None:
    vocabulary = orjson.loads(run.vocabulary_stats.read_bytes())
    write_json(run.vocabulary_stats, {**vocabulary, "sources": {"cost_$5_$10": 0.9, "x$^$y": 0.8}})
    run.report(tmp_path / "report")
    drawn = (tmp_path / "report" / "coverage.svg").read_text(encoding="utf-8")
    assert "cost_$5_$10" in drawn
    assert "x$^$y" in drawn


def test_a_damaged_log_is_named(run: Run, tmp_path: Path) -> None:
    run.training_log.write_bytes(b'{"kind": "train", "st')
    with pytest.raises(Eagle3Error, match=re.escape(str(run.training_log))):
        run.report(tmp_path / "report")


@pytest.mark.parametrize("name", ["workflow", "summary", "samples", *report.FIGURES])
def test_captions_are_valid_and_name_the_run(name: str) -> None:
    text = (CAPTIONS / f"{name}.rst").read_text(encoding="utf-8")
    snakemake = {"config": {"run": "my-run"}}
    rendered = jinja2.Template(text, undefined=jinja2.StrictUndefined).render(snakemake=snakemake)
    # halt_level 2: a warning is an error.
    body = publish_parts(rendered, writer="html", settings_overrides={"halt_level": 2})["html_body"]
    assert "my-run" in body or name not in ("workflow", "summary")


def test_no_caption_is_left_without_a_figure() -> None:
    assert {path.stem for path in CAPTIONS.glob("*.rst")} == {"workflow", "summary", "samples", *report.FIGURES}
