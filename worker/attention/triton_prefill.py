"""Prefill attention of one sequence, padded to a bucket, in one kernel a layer."""

from __future__ import annotations

import torch

from worker.attention.pooled import PooledAttention, Scoring
from worker.kernels.prefill_attention import PagedKeys, prefill_attention
from worker.kv_cache import KVCache


class TritonPrefillAttention(PooledAttention):
    """A prompt from position 0, whole in this step; or, with a block table, a later chunk of one.

    A later chunk reads `block_table` [width] int32 and `positions` [tokens] int64. Slots past a token's own are never read.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
    ) -> None:
        assert (positions is None) == (block_table is None)
        super().__init__(kv_cache, slots=slots)
        self.positions = positions
        self.block_table = block_table

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See PooledAttention."""
        return prefill_attention(q, k, v, self._paged(layer), **scoring._asdict())

    def _paged(self, layer: int) -> PagedKeys | None:
        if self.positions is None or self.block_table is None:
            return None
        return PagedKeys(
            keys=self.kv_cache.keys[layer],
            values=self.kv_cache.values[layer],
            block_table=self.block_table,
            positions=self.positions,
        )
