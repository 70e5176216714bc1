"""Triton kernels of the element-wise work, for GPUs. Every one has a plain twin that says what it computes.

All compute in float32 and read every operand once or twice: their time is that of the memory traffic. Lengths are
arguments, not compile-time constants, so rows do not recompile.
"""

from eagle3.draft.ops.attention_kernels import fold, fold_backward, spread
from eagle3.draft.ops.layer_kernels import add_rows, norm_backward, quantise, rotate, sum_rows, swiglu, swiglu_backward
from eagle3.draft.ops.loss_kernels import cross_entropy
from eagle3.draft.ops.optimizer_kernels import adamw

__all__ = [
    "adamw",
    "add_rows",
    "cross_entropy",
    "fold",
    "fold_backward",
    "norm_backward",
    "quantise",
    "rotate",
    "spread",
    "sum_rows",
    "swiglu",
    "swiglu_backward",
]
