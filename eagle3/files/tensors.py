"""Safetensors files whose bytes depend on their content alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from eagle3.files.atomic import atomic_write


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    The library writes the metadata in an order that changes from process to process; here the header's keys are
    sorted.
    """
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}, metadata=dict(metadata))
    length = int.from_bytes(data[:8], "little")
    header = orjson.dumps(orjson.loads(data[8 : 8 + length]), option=orjson.OPT_SORT_KEYS)
    # Tensor data starts at a multiple of 8, as in the format's own writer.
    header += b" " * (-len(header) % 8)
    with atomic_write(path) as temporary:
        temporary.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
