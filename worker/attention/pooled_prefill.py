"""What prefill attentions over the pool have in common: new keys and values go there before anyone looks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from worker.kv_cache import KVCache


class PooledPrefill(ABC):
    """Writes keys and values to `slots` [tokens] int64 of the pool, then attends."""

    def __init__(self, kv_cache: KVCache, *, slots: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self.slots = slots

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
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim].

        `sliding_window` counts the keys a query sees, itself among them.
        """
        self.kv_cache.write(layer, self.slots, k, v)
        return self.attend(layer, q, k, v, scale=scale, sliding_window=sliding_window)

    @abstractmethod
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
