"""Prefill attention whose queries and keys are turned, and keys and values stored, by one kernel."""

from __future__ import annotations

import torch

from worker.attention.pooled_prefill import PooledPrefill
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.rope_cache import rope_and_cache


class FusedPrefillAttention:
    """`inner`, for projections as they come and for queries, keys and values alike."""

    def __init__(self, inner: PooledPrefill) -> None:
        self.inner = inner

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
        return self.inner(layer, q, k, v, scale=scale, sliding_window=sliding_window)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        """See worker.model.attend.FusedAttend."""
        pool = self.inner.kv_cache
        rope_and_cache(qkv, layout, positions, self.inner.slots, pool.keys[layer], pool.values[layer])
        return self.inner.attend(layer, *layout.split(qkv)).flatten(1)
