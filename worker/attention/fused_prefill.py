"""Prefill attention whose queries and keys are turned, and keys and values stored, by one kernel."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.rope_cache import rope_and_cache
from worker.kv_cache import KVCache


class PrefillAttention(Protocol):
    """An attention that can leave the writing of keys and values to others."""

    kv_cache: KVCache
    slots: torch.Tensor

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

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """The same for keys and values that are in the pool already."""


class FusedPrefillAttention:
    """`inner`, for projections as they come and for queries, keys and values alike."""

    def __init__(self, inner: PrefillAttention) -> None:
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
