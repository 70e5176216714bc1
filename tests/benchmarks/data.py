"""Benchmark of the data path: clean, spans, shuffle, split and vocabulary on a synthetic set of conversations.

    python tests/benchmarks/data.py --target MODEL_FOLDER --conversations 100000
    python tests/benchmarks/data.py --target MODEL_FOLDER --conversations 3000 --text

Lengths are log-normal as in answers of chat models (median 160 prompt and 560 generated tokens, 880 in all on
average). Token ids follow a Zipf law over the target's vocabulary; with `--text` the path starts at rows of text,
passages of Python's own documentation, whose answers are used as they are: tokenising is part of the work.
`--peer FOLDER` leaves the same conversations there as other trainers read them, as text and as token ids.
Prints one JSON line per stage; `cpu_seconds` are those of all its threads, on a shared machine the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import orjson

from eagle3.config.dataset import DatasetSettings
from eagle3.config.engine import EngineSettings
from eagle3.config.machine import MachineSettings
from eagle3.config.prompts import PromptsSettings
from eagle3.config.responses import ResponsesSettings
from eagle3.config.samples import SamplesSettings
from eagle3.config.target import TargetSettings
from eagle3.config.vocabulary import VocabularySettings
from eagle3.files.find import find_files
from eagle3.files.hashing import hash_of
from eagle3.files.records import Record, read_records, write_records
from eagle3.stages import dataset, prompts, responses, samples, vocabulary
from eagle3.stages.target import make as pin
from eagle3.target.pin import load_target

MAX_LENGTH = 8192
# Characters of the text for one token, with tokenizers of 50,000 to 150,000 tokens.
CHARS = 3.7


def lengths(random: np.random.Generator) -> tuple[int, int]:
    """Return tokens of a prompt and of its answer."""
    prompt, answer = random.lognormal((5.07, 6.33), (0.6, 0.55)).astype(int) + 5
    return int(prompt), int(answer)


def conversations(count: int, vocab_size: int, end: int) -> Iterator[Record]:
    """Yield synthetic responses of one turn each."""
    random = np.random.default_rng(0)
    ranks = random.permutation(np.arange(end + 1, vocab_size))
    for number in range(count):
        prompt, answer = (ranks[random.zipf(1.3, size) % len(ranks)].tolist() for size in lengths(random))
        yield {
            "id": hash_of(number),
            "source": f"source-{number % 5}",
            "engine": {"name": "synthetic"},
            "turns": [
                {
                    "request": {"messages": [{"role": "user", "content": "x" * 4 * len(prompt)}]},
                    "prompt_ids": prompt,
                    "token_ids": [*answer, end],
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "x" * 4 * len(answer)},
                    "raw": {},
                    "error": None,
                }
            ],
        }


def rows(count: int) -> Iterator[Record]:
    """Yield rows of text in ShareGPT's form: a question and an answer."""
    random = np.random.default_rng(0)
    text = "\n\n".join(topics.values())
    words = text.split(" ")
    for number in range(count):
        passages = []
        for size in lengths(random):
            place = int(random.integers(len(words) // 2))
            passages.append(" ".join(words[place : place + 2 * size])[: int(CHARS * size)])
        question, answer = passages
        yield {
            "id": str(number),
            "conversations": [{"from": "human", "value": f"{number}: {question}"}, {"from": "gpt", "value": answer}],
        }


def work(connection: Connection, make: Callable[..., dict[str, Any]], settings: Any, paths: Any) -> None:
    """Run a stage in this process; send back its counts, CPU seconds and peak memory."""
    paths["folder"].mkdir(exist_ok=True)
    counts = make(*settings, **paths)
    used = resource.getrusage(resource.RUSAGE_SELF)
    connection.send((counts, used.ru_utime + used.ru_stime, used.ru_maxrss))


def measure(name: str, make: Callable[..., dict[str, Any]], *settings: Any, **paths: Any) -> dict[str, Any]:
    """Run a stage in a process of its own; print one JSON line and return the stage's counts."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    start = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(sender, make, settings, paths))
    process.start()
    sender.close()
    try:
        counts, cpu, peak = receiver.recv()
    except EOFError:
        raise SystemExit(f"{name} failed") from None
    process.join()
    seconds = time.perf_counter() - start
    found: dict[str, Any] = counts
    tokens = sum(v for k, v in found.items() if k in ("prompt_tokens", "generated_tokens", "tokens"))
    tokens += sum(found.get(f"{split} tokens", 0) for split in ("train", "eval"))
    line = {"stage": name, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_gb": round(peak / 1e6, 2)}
    if tokens:
        line |= {"tokens": tokens, "tokens_per_second": round(tokens / seconds)}
        line |= {"tokens_per_cpu_second": round(tokens / cpu)}
    print(json.dumps(line), flush=True)
    return found


def make_responses(options: argparse.Namespace, folder: Path, target: Path) -> list[Path]:
    """Return the shards of responses, one per part: made up, or made of text."""
    if not options.text:
        pinned = load_target(target)
        everything = conversations(options.conversations, pinned.vocab_size, pinned.eos_token_ids[0])
        shards = [folder / f"responses-{part}.jsonl.zst" for part in range(options.parts)]
        for shard in shards:
            size = options.conversations // options.parts
            write_records(shard, (record for record, _ in zip(everything, range(size), strict=False)))
        return shards
    source = folder / "text.jsonl"
    with source.open("wb") as file:
        file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows(options.conversations))
    sources = [{"path": str(source), "answers": "as_is"}]
    chosen = PromptsSettings.model_validate({"sources": sources, "parts": options.parts})
    measure("prompts", prompts.make, chosen, sources=find_files(str(source)), folder=folder / "prompts")
    shards = []
    for part in range(options.parts):
        asked, out = folder / f"prompts/part-{part}.jsonl.zst", folder / f"responses-{part}"
        stage = (ResponsesSettings(), EngineSettings(), MachineSettings())
        name = f"responses of given answers, part {part}"
        measure(name, responses.make, *stage, target=target, prompts=asked, folder=out)
        shards.append(out / "shard-0.jsonl.zst")
    return shards


def write_for_peers(folder: Path, text: Path, parts: list[Path]) -> None:
    """Leave rows of text, and of token ids with a mask of what is trained on."""
    folder.mkdir(exist_ok=True)
    if text.exists():
        (folder / "text.jsonl").write_bytes(text.read_bytes())
    with (folder / "ids.jsonl").open("wb") as file:
        for part in parts:
            for sample in read_records(part):
                [[start, end]] = sample["spans"]
                row = {"input_ids": sample["input_ids"], "loss_mask": [0] * start + [1] * (end - start)}
                file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--text", action="store_true", help="start at text, with given answers")
    parser.add_argument("--peer", type=Path, help="where to leave the conversations for other trainers")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        pin(TargetSettings(model=str(options.target)), folder=folder)
        target = folder / "target.json"
        shards = make_responses(options, folder, target)
        parts = []
        for part, shard in enumerate(shards):
            out = folder / f"samples-{part}"
            chosen = SamplesSettings(max_length=MAX_LENGTH)
            measure(f"samples, part {part}", samples.make, chosen, target=target, responses=[shard], folder=out)
            parts.append(out / "samples.jsonl.zst")
        out = folder / "dataset"
        measure("dataset", dataset.make, DatasetSettings(eval_fraction=0.01), samples=parts, folder=out)
        size = VocabularySettings(size=min(32000, load_target(target).vocab_size // 2))
        train = out / "train.jsonl.zst"
        measure("vocabulary", vocabulary.make, size, target=target, train=train, folder=folder / "vocabulary")
        if options.peer:
            write_for_peers(options.peer, folder / "text.jsonl", parts)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
