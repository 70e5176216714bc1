"""Weights of one pass, and the operations on them together with their gradients.

A pass computes in bfloat16 on a GPU, or some of its products in float8. Gradients are added up in float32, product by
product, straight into the parameters' `.grad`: no gradient of a weight exists in bfloat16, and none is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.ops.float8 import Float8, product


class Weight(NamedTuple):
    """One parameter, or the rows of several, in compute dtype."""

    value: Tensor
    """[out, in], or [H] of a norm"""
    gradients: tuple[Tensor, ...]
    """where the gradients of its rows are added up; empty without grad mode"""
    float8: Float8 | None = None
    """what the products with x and its gradient read in place of `value`"""

    @classmethod
    def of(cls, dtype: torch.dtype, *parameters: Tensor) -> Weight:
        """Cast and merge parameters, once per pass."""
        value = torch.empty(
            sum(map(len, parameters)), *parameters[0].shape[1:], dtype=dtype, device=parameters[0].device
        )
        with torch.no_grad():
            for parameter, rows in zip(parameters, value.split([len(p) for p in parameters]), strict=True):
                rows.copy_(parameter)
        gradients = _joined([_gradient(parameter) for parameter in parameters]) if torch.is_grad_enabled() else ()
        return cls(value, gradients)

    def halves(self) -> tuple[Weight, Weight]:
        """Split [out, 2H] into the weights of two inputs that are concatenated."""
        values, gradients = self.value.chunk(2, 1), [gradient.chunk(2, 1) for gradient in self.gradients]
        first, second = (Weight(value, tuple(g[i] for g in gradients)) for i, value in enumerate(values))
        return first, second

    def rows(self, start: int, stop: int) -> Weight:
        """The weight of some of the outputs."""
        edges = itertools.accumulate((len(gradient) for gradient in self.gradients), initial=0)
        parts = [g[max(start - edge, 0) : max(stop - edge, 0)] for g, edge in zip(self.gradients, edges, strict=False)]
        return Weight(self.value[start:stop], tuple(part for part in parts if len(part)))

    def in_float8(self) -> Weight:
        """Let the products with x and its gradient run in float8, if the shape allows."""
        return self._replace(float8=Float8.of(self.value))


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _joined(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One tensor for gradients that follow each other in memory, as the optimizer lays them: one product fills it."""
    for one, other in itertools.pairwise(gradients):
        shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        whole = one.is_contiguous() and other.is_contiguous()
        if not (shared and whole) or one.storage_offset() + one.numel() != other.storage_offset():
            return tuple(gradients)
    first = gradients[0]
    return (first.as_strided((sum(map(len, gradients)), *first.shape[1:]), first.stride()),)


def linear(x: Tensor, weight: Weight, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[n, in] -> [n, out], plus a tensor of that shape; into `out`, if given."""
    if weight.float8 is not None:
        found = product(x, weight.float8.rows)
        if plus is not None:
            found.add_(plus)
        return found if out is None else out.copy_(found)
    if plus is None:
        return torch.mm(x, weight.value.mT, out=out)
    return torch.addmm(plus, x, weight.value.mT, out=out)


def add_linear(total: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """Add [n, in] -> [n, out] to a tensor of that shape, in place."""
    if weight.float8 is not None:
        return total.add_(product(x, weight.float8.rows))
    return total.addmm_(x, weight.value.mT)


def linear_backward(d_out: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """Add up the weight's gradient; return that of x."""
    weight_backward(d_out, x, weight)
    return input_backward(d_out, weight)


def input_backward(d_out: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """Gradient of the output [n, out] -> of x [n, in], into `out`, if given."""
    if weight.float8 is None:
        return torch.mm(d_out, weight.value, out=out)
    d_x = product(d_out, weight.float8.columns)
    return d_x if out is None else out.copy_(d_x)


def weight_backward(d_out: Tensor, x: Tensor, weight: Weight) -> None:
    """Add up the weight's gradient."""
    for total, part in zip(weight.gradients, d_out.split([len(g) for g in weight.gradients], 1), strict=True):
        add_product(total, part.mT, x)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is float32 whatever a and b are."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
