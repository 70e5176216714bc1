"""Speed and memory of one training step: unroll, loss, backward, clipping, AdamW.

    python tests/benchmarks/train_step.py                                   # small, on CPU
    python tests/benchmarks/train_step.py --device cuda --shape llama8b     # as large as a draft for Llama-3.1-8B
    python tests/benchmarks/train_step.py --device cuda --shape kimi --supervised 0.5 --sampled
    python tests/benchmarks/train_step.py --device cuda --shape llama8b --gpus 2
    python tests/benchmarks/train_step.py --device cuda --shape llama8b --float8

Random data. Prints one JSON line: tokens/s counts the row's positions, supervised or not.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from eagle3.config.draft import DraftSettings
from eagle3.draft import parallel
from eagle3.draft.data.row import Row, build_row
from eagle3.draft.data.teacher import TeacherHead
from eagle3.draft.model.config import DraftConfig, LatentShape
from eagle3.draft.model.network import Draft
from eagle3.draft.training.flops import training_flops
from eagle3.draft.training.optimizer import Optimizer
from eagle3.draft.unroll.objective import Objective, Teacher, projected_loss
from eagle3.draft.unroll.unroll import unroll
from eagle3.draft.unroll.weights import prepare
from eagle3.hidden_states.reader import HiddenStateSample
from eagle3.target.weights import HeadWeights

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
KIMI: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
}
LATENT = LatentShape(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "draft_vocab_size": 2048,
}
SMOL: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "smollm2": SMOL,
    "llama8b": LLAMA,
    "kimi": KIMI,
    "kimi-mla": KIMI | {"attention": "mla", "latent": LATENT, "head_dim": 192, "intermediate_size": 18432},
}
# Dense bf16 peak of an H200 (and H100 SXM), for the share of it that is reached.
PEAK = 989e12
# Options that say nothing of what is measured.
UNREPORTED = {"device", "warmup", "steps", "profile"}


def main() -> None:
    options = parse()
    if options.gpus > 1:
        parallel.launch(options.gpus, functools.partial(measure, options))
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Time the step; with several processes each has rows of its own."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    seeds = [2 * parallel.rank(), 2 * parallel.rank() + 1]
    config = DraftConfig(
        **{"attention": "gqa"} | SHAPES[options.shape],
        rms_norm_eps=1e-5,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        aux_layer_ids=(2, 16, 29),
        fc_norm=False,
        norm_output=False,
        norm_before_residual=False,
    )
    settings = DraftSettings(
        unroll=options.unroll,
        sampled_unroll=options.sampled,
        loss=options.loss,
        float8=options.float8,
        optimizer=options.optimizer,
    )
    step = Step(config, settings, device)
    rows, once = step.taught([random_row(config, settings, options, seed, device) for seed in seeds])
    for _ in range(options.warmup):
        step(rows[0])
        step(rows[1])
    synchronise(device)
    parallel.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for number in range(options.steps):
        step(rows[number % 2])
    synchronise(device)
    seconds = (time.perf_counter() - started) / options.steps
    if options.profile:
        profile(step, rows[0])
    if parallel.rank() == 0:
        print(json.dumps(report(config, options, rows, seconds, device) | once))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="processes that train together, one row each")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--tokens", type=int, help="positions of the row (8192; 1024 for the small shape)")
    parser.add_argument("--documents", type=int, default=1, help="samples in the row")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of every sample that is generated")
    parser.add_argument("--unroll", type=int, default=7)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--float8", action="store_true", help="products of the layer in float8")
    parser.add_argument("--optimizer", default="adamw", help="adamw, as in the figures of others, or muon")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, to stderr")
    options = parser.parse_args()
    options.tokens = options.tokens or {"small": 1024, "smollm2": 2048}.get(options.shape, 8192)
    return options


class Step:
    """A draft, its optimiser and its teacher, all random."""

    def __init__(self, config: DraftConfig, settings: DraftSettings, device: torch.device) -> None:
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        chosen = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
        with device:
            head = HeadWeights(
                embedding=torch.randn(config.vocab_size, config.hidden_size, dtype=self.dtype),
                norm=torch.ones(config.hidden_size, dtype=self.dtype),
                lm_head=torch.randn(config.vocab_size, config.hidden_size, dtype=self.dtype) * 0.02,
                rms_norm_eps=1e-5,
            )
            self.draft = Draft(config, chosen - torch.arange(len(chosen), device="cpu"), t2d).to(device)
        self.teacher = Teacher.of(head, chosen, device, self.dtype)
        self.embedding = head.embedding
        self.teacher_head = TeacherHead(head, chosen, device, self.dtype)
        self.optimizer = Optimizer(self.draft.named_parameters(), settings)
        self.float8 = settings.float8
        self.objective = Objective.of(settings, sampled=settings.sampled_unroll)

    def taught(self, rows: list[Row]) -> tuple[list[Row], dict[str, float]]:
        """Return rows as the step reads them, on the device; and what is spent on a row once per run beforehand."""
        device = self.embedding.device
        taught = [row.with_teacher_stats([self.teacher_head(row.teacher)]).to(device) for row in rows]
        started = time.perf_counter()
        self.teacher_head(taught[0].teacher)
        seconds = time.perf_counter() - started
        del self.teacher_head
        return taught, {"teacher_stats_seconds_once_per_run": round(seconds, 4)}

    def __call__(self, row: Row) -> None:
        weights = prepare(self.draft, self.dtype, float8=self.float8)
        hidden = unroll(weights, row, self.embedding)
        totals = [len(row.order)] * len(self.objective.step_weights)
        outcome = projected_loss(hidden, weights.lm_head, self.teacher, row, self.objective, totals)
        hidden.backward(outcome.gradient)
        self.optimizer.step(1e-5)


def random_row(
    config: DraftConfig, settings: DraftSettings, options: argparse.Namespace, seed: int, device: torch.device
) -> Row:
    random = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).cpu()

    H = config.hidden_size
    context = options.tokens // options.documents
    samples: list[Any] = []
    for number in range(options.documents):
        n = context + 2
        start = max(1, round(n * (1 - options.supervised)))
        sample = HiddenStateSample(
            id=str(number),
            token_ids=torch.from_numpy(random.integers(0, config.vocab_size, n, dtype=np.int32)),
            aux=states(n, 3, H),
            last=states(n - start + 1, H),
            last_rows=torch.arange(start - 1, n),
        )
        samples.append((sample, [(start, n)]))
    if settings.sampled_unroll:
        return build_row(samples, settings.unroll, settings.decay, random)
    return build_row(samples, settings.unroll)


def report(
    config: DraftConfig, options: argparse.Namespace, rows: list[Row], seconds: float, device: torch.device
) -> dict[str, Any]:
    flops = sum(training_flops(config, row) for row in rows) / len(rows) / seconds
    result: dict[str, Any] = {
        "benchmark": "train_step",
        **{name: value for name, value in vars(options).items() if name not in UNREPORTED},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(options.gpus * options.tokens / seconds),
        "supervised_tokens_per_second": round(options.gpus * len(rows[0].order) / seconds),
        "tflops": round(flops / 1e12, 2),
    }
    if device.type == "cuda":
        result["share_of_peak"] = round(flops / PEAK, 3)
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profile(step: Step, row: Row) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with record(activities=activities) as found:
        step(row)
        synchronise(row.order.device)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90), file=sys.stderr)


if __name__ == "__main__":
    main()
