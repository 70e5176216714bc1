"""SwiGLU and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2I] -> silu(gate) * up [n, I]."""
    if gate_up.is_cuda:
        from eagle3.draft.ops.swiglu_kernel import swiglu as kernel

        return kernel(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(d_out: Tensor, gate_up: Tensor) -> None:
    """Overwrite the gradient [n, I] with the output, which is cheaper to recompute than to keep, and gate_up with its
    gradient.
    """
    if d_out.is_cuda:
        from eagle3.draft.ops.swiglu_kernel import swiglu_backward as kernel

        kernel(d_out, gate_up)
        return
    gate, up = gate_up.float().chunk(2, -1)
    d, sigmoid = d_out.float(), gate.sigmoid()
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    out, d_gate_up = gate * sigmoid * up, torch.cat([d_gate, d * gate * sigmoid], -1)
    d_out.copy_(out)
    gate_up.copy_(d_gate_up)
