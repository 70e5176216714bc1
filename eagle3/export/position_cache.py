"""A key-value cache in which a token's slot is its position.

Rows of a batch may have any lengths. Rejected tokens need no bookkeeping: the next token at
their position overwrites them, and until then every query is at an earlier position and does not see them.
"""

from __future__ import annotations

from typing import Any

import torch


class PositionCache:
    """Keys and values of a batch, for transformers' decoder models and our reference draft.

    Call `place` before every forward pass; the layers then call `update`.
    """

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._width = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Set the positions of the next tokens.

        Args:
            positions: [B, n] int64.

        Returns:
            the attention mask [B, 1, n, width] (bool): a query sees every slot up to its own position.
        """
        self._positions = positions
        self._width = max(self._width, int(positions.max()) + 1)
        slots = torch.arange(self._width, device=positions.device)
        return (slots <= positions[:, :, None])[:, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [B, heads, n, dim] of a layer; return its first slots [B, heads, width, dim]."""
        if layer not in self._layers:
            self._layers[layer] = (_empty(keys, self._width), _empty(values, self._width))
        stored = self._layers[layer]
        if stored[0].shape[2] < self._width:
            capacity = max(self._width, stored[0].shape[2] * 3 // 2)
            stored = self._layers[layer] = (_grown(stored[0], capacity), _grown(stored[1], capacity))
        assert self._positions is not None
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        for buffer, new in zip(stored, (keys, values), strict=True):
            # Forty times as fast as scatter_ on a CPU.
            buffer.transpose(1, 2)[rows, self._positions] = new.transpose(1, 2)
        return stored[0][:, :, : self._width], stored[1][:, :, : self._width]

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        self._layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._layers.items()}

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the width; transformers asks for it."""
        return self._width


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_zeros((*like.shape[:2], capacity, like.shape[3]))


def _grown(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = _empty(buffer, capacity)
    larger[:, :, : buffer.shape[2]] = buffer
    return larger
