"""A batch in the target: prefill, next tokens, and taps on inner states.

B rows · n new tokens a row · V vocabulary · H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from eagle3.export.position_cache import PositionCache

ATTENTION = "eagle3_grouped"
# More new tokens than this are a prefill, where folding gains nothing and the mask would grow.
_FOLDED = 16


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with query heads [B, heads, n, d] that share key-value heads [B, groups, m, d]; transformers' interface.

    While decoding, the query heads of a group become rows of one matrix product, so that the cache is not copied
    for each head: a step of a 135M model on a CPU takes half to two thirds of the time (measured).
    Without a mask it is causal.
    """
    B, heads, n, d = query.shape
    groups = key.shape[1]
    if heads > groups and n <= _FOLDED and attention_mask is not None:
        folded = query.reshape(B, groups, heads // groups * n, d)
        mask = attention_mask.repeat(1, 1, heads // groups, 1)
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        output = output.reshape(B, heads, n, value.shape[-1])
    else:
        causal = attention_mask is None and n > 1
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=heads > groups
        )
    return output.transpose(1, 2).contiguous(), None


def decoder_of(model: Any) -> Any:
    """Return the text decoder: what has `layers` and the final `norm`."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else decoder.get_decoder()


@contextmanager
def tapped(model: Any, layer_ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """While open, every forward pass fills the yielded list with the states [B, n, H] *entering* these layers.

    Id `number of layers` is what enters the final norm. (transformers' own `output_hidden_states` gives that
    one only after the norm.)
    """
    decoder = decoder_of(model)
    states: list[torch.Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(lambda *_: states.clear()).remove)
        for layer_id in sorted(layer_ids):
            place = decoder.norm if layer_id == len(decoder.layers) else decoder.layers[layer_id]
            stack.callback(place.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield states


class Batch:
    """Token sequences of any lengths that the target continues.

    Short prompts are padded on the right: no token can see the padding, and later tokens overwrite its slots in
    the cache. The output of a row does not depend on the other rows, except for rounding.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = decoder_of(model)
        self._cache = PositionCache()
        self.lengths = torch.zeros(0, dtype=torch.long)
        """[B] int64: how many tokens of each row are final; the position of its next token."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the prompts; return the logits [B, V] (float32) after each one's last token."""
        tokens = padded(prompts).to(self._model.device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self._logits(at(self._hidden(tokens, positions), self.lengths - 1))

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the next tokens [B, n]; return the logits [B, n, V] (float32) after each. `accept` makes them final."""
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self._logits(self._hidden(tokens, positions))

    def accept(self, counts: torch.Tensor | int) -> None:
        """Make the first `counts` ([B] or one number) of the tokens last given to `extend` final."""
        self.lengths = self.lengths + counts

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows ([B'] int64)."""
        self.lengths = self.lengths[rows]
        self._cache.select(rows)

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = self._cache.place(positions)
        output = self._decoder(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits.float()


def padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return sequences as one tensor [B, longest] int64, padded on the right with 0."""
    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def at(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return for every row of [B, n, ...] its entry number index[b]: [B, ...]."""
    return states[torch.arange(len(index), device=index.device), index]
