"""Sums over rows that are given by their indices."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def add_rows(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """Add x [n, H] to distinct rows of `total`."""
    if total.is_cuda:
        from eagle3.draft.ops.rows_kernel import add_rows as kernel

        kernel(total, rows, x)
        return
    total.index_add_(0, rows, x)


def sum_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return [n, H]: row i is the sum of x[rows[offsets[i] : offsets[i+1]]]; `offsets` has n+1 elements."""
    if x.is_cuda:
        from eagle3.draft.ops.rows_kernel import sum_rows as kernel

        return kernel(x, rows, offsets)
    return functional.embedding_bag(rows, x, offsets, mode="sum", include_last_offset=True)
