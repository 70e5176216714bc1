"""Benchmark of the data path: clean, spans, shuffle, split and vocabulary on a synthetic set of conversations.

    python tests/benchmarks/data.py --target MODEL_FOLDER --conversations 100000

Lengths are log-normal as in answers of chat models (median 160 prompt and 560 generated tokens, 880 in all on
average); token ids follow a Zipf law over the target's vocabulary. Prints one JSON line per stage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import dataset, samples, vocabulary
from eagle3.dataset import DatasetSettings
from eagle3.files.hashing import hash_of
from eagle3.files.records import Record, read_records, write_records
from eagle3.samples import SamplesSettings
from eagle3.target import TargetSettings, load_target
from eagle3.target.pin import make as pin
from eagle3.vocabulary import VocabularySettings


def conversations(count: int, vocab_size: int, end: int) -> Iterator[Record]:
    """Yield synthetic responses of one turn each."""
    random = np.random.default_rng(0)
    ranks = random.permutation(np.arange(end + 1, vocab_size))
    for number in range(count):
        lengths = random.lognormal((5.07, 6.33), (0.6, 0.55)).astype(int) + 5
        prompt, answer = (ranks[random.zipf(1.3, size) % len(ranks)].tolist() for size in lengths)
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


def measure(name: str, work: Callable[[], dict[str, Any]], tokens: int) -> None:
    """Run in a process of its own, for its peak memory; print one JSON line."""
    start = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{name} failed")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(json.dumps({"stage": name, "tokens": tokens, "seconds": round(seconds, 1), "peak_gb_so_far": round(peak, 2)}))


class Work:
    """A stage with its arguments; a class so that a spawned process can be handed it."""

    def __init__(self, make: Callable[..., dict[str, Any]], *settings: Any, **paths: Any) -> None:
        self._make, self._settings, self._paths = make, settings, paths

    def __call__(self) -> dict[str, Any]:
        self._paths["folder"].mkdir(exist_ok=True)
        return self._make(*self._settings, **self._paths)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        pin(TargetSettings(model=str(options.target)), folder=folder)
        target = folder / "target.json"
        pinned = load_target(target)
        shards = []
        everything = conversations(options.conversations, pinned.vocab_size, pinned.eos_token_ids[0])
        for part in range(options.parts):
            shards.append(folder / f"responses-{part}.jsonl.zst")
            some = (
                record for record, _ in zip(everything, range(options.conversations // options.parts), strict=False)
            )
            write_records(shards[-1], some)
        tokens = sum(
            len(turn["prompt_ids"]) + len(turn["token_ids"])
            for shard in shards
            for record in read_records(shard)
            for turn in record["turns"]
        )
        for part, shard in enumerate(shards):
            out = folder / f"samples-{part}"
            clean = Work(samples.make, SamplesSettings(max_length=8192), target=target, responses=[shard], folder=out)
            measure(f"samples, part {part}", clean, tokens // options.parts)
        inputs = [folder / f"samples-{part}" / "samples.jsonl.zst" for part in range(options.parts)]
        merge = Work(dataset.make, DatasetSettings(eval_fraction=0.01), samples=inputs, folder=folder / "dataset")
        measure("dataset", merge, tokens)
        train = folder / "dataset" / "train.jsonl.zst"
        size = VocabularySettings(size=min(32000, pinned.vocab_size // 2))
        count = Work(vocabulary.make, size, target=target, train=train, folder=folder / "vocabulary")
        measure("vocabulary", count, tokens)


if __name__ == "__main__":
    main()
