"""Size and speed of hidden-state shards, next to one file per sample (torch.save + gzip, plain safetensors).

    python tests/benchmarks/hidden_states.py [--target target.json --text FILE...] [--gigabytes 0.5] [--shards 100]

With `--target` the states are real ones: a target's, over the given text. Otherwise they are synthetic: normal numbers
with a scale for each channel, 7,168 wide. Prints one JSON line per subject. Files are in the page cache when read.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from eagle3.hidden_states import codec
from eagle3.hidden_states.capture_log import CaptureLog
from eagle3.hidden_states.codec import Encoding
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.hidden_states.shard import write_shard
from eagle3.hidden_states.stored_sample import Provenance, StoredSample
from eagle3.hidden_states.writer import CaptureSample, CaptureWriter


class Seconds(NamedTuple):
    """How long something took; on a machine that does other things as well, the second figure says more."""

    wall: float
    cpu: float
    """Processor seconds of all threads."""


THREADS = 2
LAYERS = (2, 30, 58, 61)


def synthetic(gigabytes: float, width: int = 7168, tokens: int = 512) -> list[torch.Tensor]:
    """Return samples [n, L, H]: every layer with a scale for each channel, a few of them large."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(0.6 * torch.randn(len(LAYERS), width, generator=generator))
    scale[:, :8] *= 100
    count = max(2, round(gigabytes * 1e9 / (tokens * len(LAYERS) * width * 2)))
    return [(torch.randn(tokens, len(LAYERS), width, generator=generator) * scale).bfloat16() for _ in range(count)]


def real(target: Path, texts: list[Path], gigabytes: float, tokens: int = 1024) -> list[torch.Tensor]:
    """Return samples [n, L, H] of a target's own states."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eagle3.target.pin import load_target

    pinned = load_target(target)
    tokenizer = AutoTokenizer.from_pretrained(pinned.path)
    model = AutoModelForCausalLM.from_pretrained(pinned.path, dtype=torch.bfloat16)
    ids = tokenizer("\n".join(path.read_text(encoding="utf-8") for path in texts)).input_ids
    last: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda _, x: last.update(x=x[0]))
    found: list[torch.Tensor] = []
    for start in range(0, len(ids), tokens):
        with torch.no_grad():
            out = model(torch.tensor([ids[start : start + tokens]]), output_hidden_states=True)
        states = [out.hidden_states[layer] for layer in pinned.aux_layer_ids] + [last["x"]]
        found.append(torch.stack([one[0] for one in states], 1))
        if sum(one.nbytes for one in found) >= gigabytes * 1e9:
            break
    return found


def timed(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def shards(states: list[torch.Tensor], folder: Path, encoding: Encoding) -> dict[str, Seconds]:
    """Measure ours: to durable logs, on to a shard, and back."""
    n, L, H = states[0].shape
    provenance = Provenance("part", "revision", LAYERS, H, encoding, "benchmark", "bfloat16", {})
    log = CaptureLog(folder / "log", provenance.part, L - 1)
    path = folder / "shard-0.safetensors"

    def capture() -> None:
        with CaptureWriter({0: log}, threads=THREADS, limit=1 << 30) as writer:
            for number, one in enumerate(states):
                ids = np.arange(len(one), dtype=np.int32)
                writer.submit(CaptureSample(f"s{number:05}", ids, ids, 0), codec.bits(one), 0, provenance)
            writer.drain()

    def read() -> None:
        for one in HiddenStateReader([path], threads=THREADS).stream(ahead_tokens=8 * n):
            assert one.aux.shape[2] == H

    figures = {"write": timed(capture)}
    figures["finish"] = timed(lambda: write_shard(path, provenance, 0, 1, list(log.samples.values())))
    log.remove()
    figures["read"] = min(timed(read) for _ in range(2))
    reader = HiddenStateReader([path], threads=THREADS)
    one = reader.ids[len(reader) // 2]
    figures["one"] = min(timed(lambda: reader.read(one)) for _ in range(3))
    return figures


def per_sample(
    states: list[torch.Tensor],
    folder: Path,
    write: Callable[[Path, torch.Tensor], None],
    read: Callable[[Path], object],
) -> dict[str, Seconds]:
    """Measure one file per sample, as many threads."""
    paths = [folder / f"data_{number}" for number in range(len(states))]
    with ThreadPoolExecutor(THREADS) as pool:
        figures = {"write": timed(lambda: list(pool.map(write, paths, states)))}
        figures["read"] = min(timed(lambda: list(pool.map(read, paths))) for _ in range(2))
    figures["one"] = min(timed(lambda: read(paths[0])) for _ in range(3))
    return figures


def write_gzip(path: Path, states: torch.Tensor) -> None:
    buffer = io.BytesIO()
    torch.save({"aux_hidden_state": states[:, :-1].clone(), "hidden_state": states[:, -1].clone()}, buffer)
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(buffer.getvalue())


def read_gzip(path: Path) -> object:
    with gzip.open(path, "rb") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True)


def write_plain(path: Path, states: torch.Tensor) -> None:
    save_file({"hidden_states": states}, path)


def read_plain(path: Path) -> object:
    return load_file(path)["hidden_states"].clone()


def subjects(states: list[torch.Tensor]) -> Iterator[tuple[str, Callable[[Path], dict[str, Seconds]]]]:
    yield "shards, lossless", lambda folder: shards(states, folder, "lossless")
    yield "shards, fp8", lambda folder: shards(states, folder, "fp8")
    yield "plain safetensors per sample", lambda folder: per_sample(states, folder, write_plain, read_plain)
    yield "torch.save and gzip per sample", lambda folder: per_sample(states, folder, write_gzip, read_gzip)


def opening(folder: Path, count: int) -> dict[str, Any]:
    """Measure opening `count` shards of 100 samples with 880 tokens each, in a process of its own."""
    provenance = Provenance("part", "revision", LAYERS, 1, "lossless", "benchmark", "bfloat16", {})
    log = CaptureLog(folder / "log", provenance.part, 3)
    ids = np.arange(880, dtype=np.int32)
    with CaptureWriter({0: log}, threads=THREADS, limit=1 << 30) as writer:
        writer.submit(CaptureSample("s", ids, ids, 0), np.zeros((880, 4, 1), np.uint16), 0, provenance)
        writer.drain()
    like = vars(log.samples["s"])
    for number in range(count):
        samples = [StoredSample(**{**like, "id": f"{number:06}-{one:03}"}) for one in range(100)]
        write_shard(folder / f"shard-{number}.safetensors", provenance, number, count, samples)
    log.remove()
    done = subprocess.run([sys.executable, __file__, "--open", folder], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def open_all(folder: Path) -> None:
    """Open all shards of a folder and print time and memory."""
    paths = sorted(folder.glob("shard-*.safetensors"))
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    reader = HiddenStateReader(paths)
    seconds = time.perf_counter() - start
    memory = (process.memory_info().rss - before) >> 20
    print(json.dumps({"samples": len(reader), "seconds": round(seconds, 3), "mb": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--gigabytes", type=float, default=0.25)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--open", type=Path)
    options = parser.parse_args()
    if options.open:
        open_all(options.open)
        return
    torch.set_num_threads(1)
    kind = "real" if options.target else "synthetic"
    states = real(options.target, options.text, options.gigabytes) if options.target else synthetic(options.gigabytes)
    plain = sum(one.nbytes for one in states)
    for name, measure in subjects(states):
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(Path(folder))
            files = list(Path(folder).iterdir())
            size = sum(path.stat().st_size for path in files)
        rates = {}
        for part in ("write", "finish", "read"):
            if part in figures:
                rates[f"{part}_mb_s"] = round(plain / figures[part].wall / 1e6)
                rates[f"{part}_mb_per_cpu_s"] = round(plain / figures[part].cpu / 1e6)
        one = {"one_sample_ms": round(1e3 * figures["one"].wall, 1), "one_sample_mb": round(states[0].nbytes / 1e6, 1)}
        about = {"states": kind, "width": states[0].shape[2], "mb": plain // 10**6, "cpus": os.cpu_count()}
        line = {"subject": name, **about, "share_of_bf16": round(size / plain, 4), **rates, **one, "files": len(files)}
        print(json.dumps(line), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        line = {"subject": "opening", "shards": options.shards, **opening(Path(folder), options.shards)}
        print(json.dumps(line))


if __name__ == "__main__":
    main()
