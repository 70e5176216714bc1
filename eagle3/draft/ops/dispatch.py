"""How functions run on a GPU: compiled, or recorded as a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def pass_dtype(device: torch.device) -> torch.dtype:
    """Return what a pass of the draft computes in: bfloat16 where there are kernels for it, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Fuse `function` with torch.compile where its tensors are on a GPU; the second length seen makes lengths
    dynamic, so rows do not recompile.

    On CPU it runs as written.
    """
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        fast: Callable[P, R] = compiled() if first.is_cuda else function
        return fast(*args, **kwargs)

    return call


class CudaGraphed:
    """Calls a function on a GPU as one CUDA graph: many small kernels at the cost of launching one.

    The function's arguments are tensors, which may differ between calls. It returns nothing, works in place on tensors
    whose storage never changes, and never waits for the GPU. On other devices it is simply called.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.inputs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> None:
        """Run once as written, which lets libraries set themselves up; then record, and from then on replay."""
        if not inputs[0].is_cuda:
            self.function(*inputs)
        elif not self.inputs:
            self.inputs = [tensor.clone() for tensor in inputs]
            self.function(*inputs)
        else:
            for kept, tensor in zip(self.inputs, inputs, strict=True):
                kept.copy_(tensor)
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                # Other threads pin memory meanwhile, which a capture of the whole process would not survive.
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.function(*self.inputs)
            self.graph.replay()
