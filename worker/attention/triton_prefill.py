"""Prefill attention of one sequence, padded to a bucket, in one kernel a layer."""

from __future__ import annotations

import torch

from worker.kernels.prefill_attention import PagedKeys, prefill_attention
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.rope_cache import rope_and_cache
from worker.kv_cache import KVCache


class TritonPrefillAttention:
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
        self.kv_cache = kv_cache
        self.slots = slots
        self.positions = positions
        self.block_table = block_table

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """See worker.causal_lm.StepAttention."""
        self.kv_cache.write(layer, self.slots, k, v)
        return prefill_attention(q, k, v, self._paged(layer), scale=scale, sliding_window=sliding_window)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        """See worker.model.attend.FusedAttend."""
        pool = self.kv_cache
        rope_and_cache(qkv, layout, positions, self.slots, pool.keys[layer], pool.values[layer])
        return prefill_attention(*layout.split(qkv), self._paged(layer)).flatten(1)

    def _paged(self, layer: int) -> PagedKeys | None:
        if self.positions is None or self.block_table is None:
            return None
        return PagedKeys(
            keys=self.kv_cache.keys[layer],
            values=self.kv_cache.values[layer],
            block_table=self.block_table,
            positions=self.positions,
        )
