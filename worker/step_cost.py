"""What a decode step costs by tier and rows, for deciding whether tiers decode together."""

from __future__ import annotations

from dataclasses import dataclass

from worker.causal_lm import ModelShape

PASSES = 3
"""Over the keys and values of a tier where attention gathers them first: read, written side by side, read again."""


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes that one step moves, as its cost: all weights once, and for every row keys and values over the whole tier.

    So it is where attention is computed over a tier's full width. Kernels that leave a row at its own length read no
    more in a longer tier; for them there is nothing to decide, and no such cost.
    """

    weight_bytes: int
    token_bytes: int
    """A row's, for each token of the tier."""

    @classmethod
    def of(cls, shape: ModelShape, weight_bytes: int, itemsize: int) -> BytesMoved:
        """Of a model whose keys and values have numbers of `itemsize` bytes."""
        numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        return cls(weight_bytes, PASSES * numbers * itemsize)

    def __call__(self, tier: int, num_rows: int) -> float:
        """Of a step of so many rows in a tier."""
        return self.weight_bytes + num_rows * tier * self.token_bytes
