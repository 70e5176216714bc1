"""Teacher stats: what a loss needs of the target's distribution over its whole vocabulary, for every root.

The loss computes the target's logits on the draft vocabulary only. From the rest it needs the most likely token and a
few sums. They are the same in every epoch, so they are computed once, before the first step: 16 bytes per root.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.console import Progress
from eagle3.draft import parallel
from eagle3.draft.data.packing import Spans, supervised_roots
from eagle3.draft.data.row import TeacherStats
from eagle3.draft.ops.dispatch import compiled_on_gpu
from eagle3.draft.ops.logits import chunk_rows, project
from eagle3.files.atomic import atomic_write
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.weights import HeadWeights

# Roots per call of the head.
BATCH = 4096


class TeacherHead:
    """The target's head on its whole vocabulary."""

    def __init__(self, head: HeadWeights, target_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """`target_ids` are the tokens of the draft vocabulary, in order."""
        self.norm, self.lm_head = head.norm.to(device, dtype), head.lm_head.to(device, dtype)
        self.eps = head.rms_norm_eps
        self.target_ids = target_ids.to(device)
        self.places = torch.full((len(head.lm_head),), -1, dtype=torch.int32)
        self.places[target_ids.cpu()] = torch.arange(len(target_ids), dtype=torch.int32)
        self.rows = chunk_rows(device, len(head.lm_head))

    @torch.no_grad()
    def __call__(self, states: Tensor) -> TeacherStats:
        """Return the stats of the target's predictions from last-layer states [R, H], on the CPU."""
        chunks = states.to(self.lm_head.device).split(self.rows)
        parts = [_teacher_stats(project(chunk, self.norm, self.lm_head, self.eps), self.target_ids) for chunk in chunks]
        top, *sums = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return TeacherStats(self.places[top], *sums)


@compiled_on_gpu
def _teacher_stats(logits: Tensor, target_ids: Tensor) -> tuple[Tensor, ...]:
    chosen = logits[:, target_ids]
    lse = chosen.logsumexp(-1)
    logs = chosen - lse[:, None]
    return logits.argmax(-1), logits.logsumexp(-1), lse, (logs.exp() * logs).sum(-1)


class StatsBySample:
    """The stats of samples, by id; joined in one tensor each, as there may be hundreds of thousands of samples."""

    def __init__(self, ids: Sequence[str], sizes: Sequence[int], joined: TeacherStats) -> None:
        """`sizes` are the samples' numbers of roots, in the order of `joined`."""
        edges = [0, *itertools.accumulate(sizes)]
        self.ids, self.sizes, self.joined = ids, sizes, joined
        self.places = {sample: slice(*edge) for sample, edge in zip(ids, itertools.pairwise(edges), strict=True)}

    def __getitem__(self, sample: str) -> TeacherStats:
        place = self.places[sample]
        return TeacherStats(*(part[place] for part in self.joined))


def compute_stats(spans: Mapping[str, Spans], reader: HiddenStateReader, head: TeacherHead) -> StatsBySample:
    """Return the stats of all roots of samples (id -> spans); processes share the work, and each gets all stats."""
    mine: list[tuple[list[str], list[int], TeacherStats]] = []
    with Progress(len(spans) if parallel.rank() == 0 else 0, "teacher stats", "samples") as bar:
        for batch in _batches(spans, reader):
            states = [part for _, part in batch]
            mine.append(([sample for sample, _ in batch], list(map(len, states)), head(torch.cat(states))))
            bar.update(len(batch) * parallel.world())
    ids, sizes, stats = zip(*parallel.gather(mine), strict=True)
    joined = TeacherStats(*(torch.cat(parts) for parts in zip(*stats, strict=True)))
    return StatsBySample(list(itertools.chain(*ids)), list(itertools.chain(*sizes)), joined)


def cached_stats(path: Path, key: str, compute: Callable[[], StatsBySample]) -> StatsBySample:
    """Return the stats in `path` from an earlier start of the run, or compute them; `key` identifies their inputs."""
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata()["key"] == key:
                ids, sizes = orjson.loads(file.metadata()["ids"]), file.get_tensor("sizes").tolist()
                return StatsBySample(ids, sizes, TeacherStats(*map(file.get_tensor, TeacherStats._fields)))
    computed = compute()
    # All processes have finished computing, so none is still looking for the file.
    if parallel.rank() == 0:
        tensors = {"sizes": torch.tensor(computed.sizes), **computed.joined._asdict()}
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, {"key": key, "ids": orjson.dumps(computed.ids).decode()})
    return computed


def _batches(spans: Mapping[str, Spans], reader: HiddenStateReader) -> Iterator[list[tuple[str, Tensor]]]:
    batch: list[tuple[str, Tensor]] = []
    for sample in reader.stream(ids=list(spans), rank=parallel.rank(), ranks=parallel.world(), aux=False):
        roots, _ = supervised_roots(spans[sample.id], 1)
        batch.append((sample.id, sample.last[sample.rows_at(roots + 1)]))
        if sum(len(states) for _, states in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
