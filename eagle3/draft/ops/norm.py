"""RMSNorm and its gradient."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from eagle3.draft.ops.linear import Weight


def norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """RMSNorm over the last dimension, statistics in float32."""
    return functional.rms_norm(x, weight.value.shape, weight.value, eps)


def norm_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Weight,
    eps: float,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add up the weight's gradient; return that of x [n, H], plus a tensor of its shape; into `out`, if given, which
    may be `d_out`.
    """
    buffer = x.new_empty(x.shape) if out is None else out
    return _norm_backward(d_out, x, weight.value, eps, plus, weight.gradients[0], buffer)


def _norm_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, eps: float, plus: Tensor | None, total: Tensor, out: Tensor
) -> Tensor:
    if d_out.is_cuda:
        from eagle3.draft.ops.norm_kernel import norm_backward as kernel

        return kernel(d_out, x, weight, eps, plus, total, out)
    d, wide = d_out.float(), x.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = wide * inverse
    d_normed = d * weight
    d_x = (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)) * inverse
    total.add_((d * normed).sum(0))
    return out.copy_(d_x if plus is None else d_x.add_(plus))
