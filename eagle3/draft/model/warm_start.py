"""Warm start: the weights of an earlier draft model, ours or another trainer's, in a new one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle3.draft.model.compatibility import check_config
from eagle3.draft.model.config import HEAD, WEIGHTS
from eagle3.draft.model.network import Draft
from eagle3.errors import Eagle3Error
from eagle3.target.pin import Target

# Tensors in other trainers' files that are not weights of the draft: the target's embedding, the vocabulary map.
_NOT_WEIGHTS = frozenset({"embed_tokens.weight", "d2t", "t2d"})


@torch.no_grad()
def load_warm_start(draft: Draft, folder: Path, target: Target) -> None:
    """Copy the weights of an earlier draft model; of lm_head, the rows of the tokens in both vocabularies.

    Raises:
        Eagle3Error: there are no weights; the earlier configuration is missing or differs; a tensor is missing,
            unknown or of another shape (names them all); its vocabulary has tokens that the target does not have.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        raise Eagle3Error(
            "there is no draft to start from",
            where=path,
            found=", ".join(pickled) or None,
            remedy=f"convert it to {WEIGHTS}, as pickled weights are not read: safetensors.torch.save_file("
            "torch.load(FILE, weights_only=True), OUTPUT)"
            if pickled
            else "give the folder of a draft, or set draft.warm_start to null",
        )
    check_config(folder, draft.config, target)
    found = {name.replace("midlayer.", "layers.0."): value for name, value in load_file(path).items()}
    weights = {name: value for name, value in found.items() if name not in _NOT_WEIGHTS}
    expected = dict(draft.named_parameters())
    _check_shapes(weights, expected, folder)
    ids = _target_ids(found, draft.config.vocab_size, path)
    for name, parameter in expected.items():
        if name != HEAD:
            parameter.copy_(weights[name])
    places = torch.full((draft.config.vocab_size,), -1).index_put_((ids,), torch.arange(len(ids)))[draft.target_ids]
    known = places >= 0
    draft.lm_head.weight[known] = weights[HEAD][places[known]].float()


def _target_ids(found: dict[str, Tensor], vocab_size: int, path: Path) -> Tensor:
    """Return the target's token of every row of lm_head, [rows] int64."""
    rows = len(found[HEAD])
    d2t = found.get("d2t", torch.zeros(rows, dtype=torch.int64))
    if len(d2t) != rows:
        raise Eagle3Error(
            "the vocabulary of the draft to start from does not fit its lm_head",
            where=f"{path}, tensor d2t",
            found=f"{len(d2t):,} tokens",
            expected=f"{rows:,}, one for each row of lm_head",
            remedy="copy the earlier draft again, or set draft.warm_start to null",
        )
    ids = torch.arange(rows) + d2t
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise Eagle3Error(
            "the draft to start from proposes tokens that the target does not have",
            where=f"{path}, tensor {'d2t' if 'd2t' in found else HEAD}",
            found=f"{len(outside):,} ids, the first of them {int(outside[0]):,}",
            expected=f"ids from 0 to {vocab_size - 1:,}",
            remedy="give an earlier draft of this target, or set draft.warm_start to null",
        )
    return ids


def _check_shapes(found: dict[str, Tensor], expected: dict[str, torch.nn.Parameter], folder: Path) -> None:
    def size(tensors: dict[str, Tensor] | dict[str, torch.nn.Parameter], name: str) -> object:
        # lm_head may have any number of rows: they are matched by token.
        shape = list(tensors[name].shape) if name in tensors else "missing"
        return shape[1:] if name == HEAD and isinstance(shape, list) else shape

    names = sorted(name for name in found.keys() | expected.keys() if size(found, name) != size(expected, name))
    if names:
        raise Eagle3Error(
            "the tensors of the draft to start from do not fit this draft",
            where=folder / WEIGHTS,
            found={name: size(found, name) for name in names},
            expected={name: size(expected, name) for name in names},
            remedy="give a draft of the same target and shape, or set draft.warm_start to null",
        )
