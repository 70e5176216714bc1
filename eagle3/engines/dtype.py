"""The dtype in which the target is computed."""

from __future__ import annotations

import platform

from eagle3.target.pin import Target


def compute_dtype(name: str, target: Target, device: str) -> str:
    """Return the name of the compute dtype: `auto` is the checkpoint's, or float32 on a CPU that would emulate it.

    Args:
        name: `engine.dtype`.
        target: the model.
        device: torch's device type, such as `cpu` or `cuda`.
    """
    if name != "auto":
        return name
    own = str(target.config.get("dtype") or target.config.get("torch_dtype") or "bfloat16")
    return "float32" if device == "cpu" and not (own == "bfloat16" and _has_bfloat16()) else own


def _has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX or Arm's)."""
    import torch

    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
