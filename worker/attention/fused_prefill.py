"""Prefill attention whose queries and keys are turned, and keys and values stored, by one kernel."""

from __future__ import annotations

import torch

from worker.attention.pooled import PooledAttention, Scoring
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.rope_cache import rope_and_cache


class FusedPrefillAttention(PooledAttention):
    """`inner`, for projections as they come and for queries, keys and values alike."""

    def __init__(self, inner: PooledAttention) -> None:
        super().__init__(inner.kv_cache, slots=inner.slots)
        self.inner = inner

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See PooledAttention."""
        return self.inner.attend(layer, q, k, v, scoring)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        """See worker.model.attend.FusedAttend."""
        pool = self.kv_cache
        rope_and_cache(qkv, layout, positions, self.slots, pool.keys[layer], pool.values[layer])
        return self.inner.attend(layer, *layout.split(qkv), Scoring()).flatten(1)
