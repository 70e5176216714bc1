"""What keeps a step fast on a GPU, as far as tests without one can tell: nothing waits for it, recompiling is rare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.config.draft import DraftSettings
from eagle3.draft.data import teacher as teacher_stats
from eagle3.draft.ops import logits
from eagle3.draft.training import optimizer
from eagle3.draft.unroll import objective
from tests.draft.conftest import random_draft, random_head, tiny_config
from tests.draft.unroll.steps import Steps

ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# These ask if they are given a mask instead of places.
INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}


class Asked(TorchDispatchMode):
    """Notes every operation that has to know what a tensor holds: on a GPU the host would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = args[1] if func.overloadpacket in INDEXING else None
        masked = places and any(place is not None and place.dtype == torch.bool for place in places)
        if masked or (places is None and ASKING & set(func.tags)):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def steps(folder: Path, samples: int, variant: dict[str, Any], **settings: Any) -> Steps:
    generator = torch.Generator().manual_seed(1)
    draft, head = random_draft(tiny_config(max_position_embeddings=1024, **variant), generator), random_head(generator)
    return Steps(draft, head, DraftSettings(unroll=4, batch_tokens=512, **settings), samples, folder, shrink=8)


@pytest.mark.parametrize("variant", [{}, {"latent": True, "fc_norm": True, "norm_output": True}], ids=["gqa", "mla"])
@pytest.mark.parametrize("settings", [{}, {"loss": "lk_lambda", "optimizer": "adamw"}, {"loss": "ce"}], ids=str)
def test_a_step_asks_for_no_value(
    variant: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference implementation of a kernel that asks inside.
    monkeypatch.setattr(optimizer, "adamw", lambda *_: None)
    run = steps(tmp_path, 20, variant, **settings)
    with Asked() as asked:
        run.take(0)
        run.take(1)
        assert not asked.operations
        float(run.trainer.skipped)
        assert len(asked.operations) == 1


def test_new_lengths_rarely_recompile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled on a GPU is traced here, where compiling would take minutes."""
    # Many chunks a row, the last one of any length.
    monkeypatch.setitem(logits.CHUNK_BYTES, "cpu", 1 << 17)
    for module, name in ((objective, "value_and_gradient"), (teacher_stats, "_teacher_stats")):
        monkeypatch.setattr(module, name, torch.compile(getattr(module, name).__wrapped__, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    run = steps(tmp_path, 320, {}, loss="lk_lambda")
    for number in range(50):
        run.take(number)
    # Of either, torch would compile eight and run the rest uncompiled.
    assert 4 <= counters["stats"]["unique_graphs"] <= 8
