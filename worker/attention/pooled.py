"""What attentions over the pool have in common: new keys and values go there before anyone looks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from worker.kv_cache import KVCache


class Scoring(NamedTuple):
    """How queries look at keys."""

    scale: float | None = None
    """None = 1 / sqrt(head_dim)."""
    sliding_window: int | None = None
    """Keys that a query sees, itself among them; None = all."""


class ScoredAttention(ABC):
    """Takes how queries look at keys as one value."""

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
        return self.step(layer, q, k, v, Scoring(scale, sliding_window))

    @abstractmethod
    def step(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Put k and v [tokens, kv_heads, head_dim] into the pool and attend with q [tokens, heads, head_dim] -> its shape."""


class PooledAttention(ScoredAttention):
    """Writes keys and values to `slots` [tokens] int64 of the pool, then attends."""

    def __init__(self, kv_cache: KVCache, *, slots: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self.slots = slots

    def step(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See ScoredAttention."""
        self.kv_cache.write(layer, self.slots, k, v)
        return self.attend(layer, q, k, v, scoring)

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """q [tokens, heads, head_dim] over keys and values that are in the pool already -> the same shape.

        k and v [tokens, kv_heads, head_dim] are those of these tokens; in a decode step a token is a row.
        """
