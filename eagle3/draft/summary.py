"""What the target's whole distribution comes to at a root: its most likely token, and the log-sum-exp.

The loss reads the target's logits on the draft vocabulary, a small part of the whole; of all others it needs no more
than this. It is the same in every pass and for every draft, so it is computed once, before training, and 8 bytes a
root are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from eagle3.console import progress
from eagle3.draft import parallel
from eagle3.draft.accelerate import compiled_on_gpu
from eagle3.draft.objective import CHUNK_BYTES, project
from eagle3.draft.packing import Spans, supervised_roots
from eagle3.draft.rows import Summary
from eagle3.hidden_states.reader import HiddenStateReader
from eagle3.target import HeadWeights

# Roots that are looked at together.
BATCH = 4096


class Summariser:
    """The target's whole head."""

    def __init__(self, head: HeadWeights, target_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """`target_ids` are the tokens of the draft vocabulary, in order."""
        self.norm, self.lm_head = head.norm.to(device, dtype), head.lm_head.to(device, dtype)
        self.eps = head.rms_norm_eps
        self.places = torch.full((len(head.lm_head),), -1, dtype=torch.int32)
        self.places[target_ids.cpu()] = torch.arange(len(target_ids), dtype=torch.int32)
        self.rows = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // (4 * len(head.lm_head)))

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Summary:
        """Summarise what the target says from last-layer states [R, H]; the result is on the CPU."""
        chunks = states.to(self.lm_head.device).split(self.rows)
        parts = [_summarise(project(chunk, self.norm, self.lm_head, self.eps)) for chunk in chunks]
        top, lse = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return Summary(self.places[top], lse)


@compiled_on_gpu
def _summarise(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.logsumexp(-1)


def summarise(spans: Mapping[str, Spans], reader: HiddenStateReader, summariser: Summariser) -> dict[str, Summary]:
    """Summarise all roots of samples, given by id with their spans; processes share the work and all get the result."""
    mine: list[tuple[str, Summary]] = []
    with progress(len(spans) if parallel.rank() == 0 else 0, "target's choices", "samples") as bar:
        for batch in _batches(spans, reader):
            summary = summariser(torch.cat([states for _, states in batch]))
            sizes = [len(states) for _, states in batch]
            parts = zip(*(x.split(sizes) for x in summary), strict=True)
            mine += [(sample, Summary(*part)) for (sample, _), part in zip(batch, parts, strict=True)]
            bar.update(len(batch) * parallel.world())
    return dict(parallel.gather(mine))


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
