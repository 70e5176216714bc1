"""Compilation of element-wise work on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# One graph per number of own-column keys and gradient mode is expected; more means a shape is not dynamic.
RECOMPILE_LIMIT = 64


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Fuse `function` with torch.compile when its tensors are on a GPU; the second length seen makes
    lengths dynamic, so rows do not recompile.

    On CPU it runs as written: the same operations in the same order on every machine.
    """

    @functools.cache
    def compiled() -> Callable[P, R]:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        fast: Callable[P, R] = torch.compile(function)
        return fast

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        return compiled()(*args, **kwargs) if first.is_cuda else function(*args, **kwargs)

    return call
