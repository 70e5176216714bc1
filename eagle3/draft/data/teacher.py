"""What the target's distribution comes to at a root: its most likely token, and a few sums.

The loss reads the target's logits on the draft vocabulary, a small part of the whole; of all others it needs no more
than this, and of these it need not find the sums again. They are the same in every pass, so they are computed once,
before the first, and 16 bytes a root are kept.
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
from eagle3.draft.data.packing import Spans, supervised_roots
from eagle3.draft.data.row import Summary
from eagle3.draft.ops.dispatch import compiled_on_gpu
from eagle3.draft.ops.logits import chunk_rows, project
from eagle3.draft.training import parallel
from eagle3.files.atomic import atomic_write
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target.weights import HeadWeights

# Roots that are looked at together.
BATCH = 4096


class Summariser:
    """The target's whole head."""

    def __init__(self, head: HeadWeights, target_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """`target_ids` are the tokens of the draft vocabulary, in order."""
        self.norm, self.lm_head = head.norm.to(device, dtype), head.lm_head.to(device, dtype)
        self.eps = head.rms_norm_eps
        self.target_ids = target_ids.to(device)
        self.places = torch.full((len(head.lm_head),), -1, dtype=torch.int32)
        self.places[target_ids.cpu()] = torch.arange(len(target_ids), dtype=torch.int32)
        self.rows = chunk_rows(device, len(head.lm_head))

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Summary:
        """Summarise what the target says from last-layer states [R, H]; the result is on the CPU."""
        chunks = states.to(self.lm_head.device).split(self.rows)
        parts = [_summarise(project(chunk, self.norm, self.lm_head, self.eps), self.target_ids) for chunk in chunks]
        top, *sums = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return Summary(self.places[top], *sums)


@compiled_on_gpu
def _summarise(logits: Tensor, target_ids: Tensor) -> tuple[Tensor, ...]:
    chosen = logits[:, target_ids]
    lse = chosen.logsumexp(-1)
    logs = chosen - lse[:, None]
    return logits.argmax(-1), logits.logsumexp(-1), lse, (logs.exp() * logs).sum(-1)


class Summaries:
    """The summaries of samples, by id; in one piece, for there may be hundreds of thousands."""

    def __init__(self, ids: Sequence[str], sizes: Sequence[int], whole: Summary) -> None:
        """`sizes` are the samples' numbers of roots, in the order of `whole`."""
        edges = [0, *itertools.accumulate(sizes)]
        self.ids, self.sizes, self.whole = ids, sizes, whole
        self.places = {sample: slice(*edge) for sample, edge in zip(ids, itertools.pairwise(edges), strict=True)}

    def __getitem__(self, sample: str) -> Summary:
        place = self.places[sample]
        return Summary(*(part[place] for part in self.whole))


def summarise(spans: Mapping[str, Spans], reader: HiddenStateReader, summariser: Summariser) -> Summaries:
    """Summarise all roots of samples, given by id with their spans; processes share the work and all get the result."""
    mine: list[tuple[list[str], list[int], Summary]] = []
    with Progress(len(spans) if parallel.rank() == 0 else 0, "target's choices", "samples") as bar:
        for batch in _batches(spans, reader):
            states = [part for _, part in batch]
            mine.append(([sample for sample, _ in batch], list(map(len, states)), summariser(torch.cat(states))))
            bar.update(len(batch) * parallel.world())
    ids, sizes, summaries = zip(*parallel.gather(mine), strict=True)
    whole = Summary(*(torch.cat(parts) for parts in zip(*summaries, strict=True)))
    return Summaries(list(itertools.chain(*ids)), list(itertools.chain(*sizes)), whole)


def kept(path: Path, key: str, make: Callable[[], Summaries]) -> Summaries:
    """Return what an earlier start of the run left in `path`, or make it; `key` says what it was made from."""
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata()["key"] == key:
                ids, sizes = orjson.loads(file.metadata()["ids"]), file.get_tensor("sizes").tolist()
                return Summaries(ids, sizes, Summary(*map(file.get_tensor, Summary._fields)))
    made = make()
    # Making it took all processes: none looks for the file any more.
    if parallel.rank() == 0:
        tensors = {"sizes": torch.tensor(made.sizes), **made.whole._asdict()}
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, {"key": key, "ids": orjson.dumps(made.ids).decode()})
    return made


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
