"""Prefill attention whose shapes do not depend on lengths, for one sequence padded to a token bucket."""

from __future__ import annotations

import torch

from worker.attention.pooled import PooledAttention, Scoring
from worker.attention.prefill import attend_causal
from worker.kv_cache import KVCache


class FreshPrefillAttention(PooledAttention):
    """A prompt from position 0, whole in this step: plainly causal, so that padding at the end changes no live token."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:  # noqa: ARG002 (one signature for all)
        """See PooledAttention."""
        mask = None
        scale, sliding_window = scoring
        if sliding_window is not None and sliding_window < q.shape[0]:
            ones = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device)
            mask = ones.tril_().triu_(diagonal=1 - sliding_window)
        return attend_causal(q, k, v, mask, scale)


class ChunkPrefillAttention(PooledAttention):
    """A later chunk of a prompt, against everything before it, over the full width of a tier.

    Reads `block_table` [width] int32, `positions` [tokens] int64 and `context_len` [1] int64 (with this chunk).
    Padding tokens sit at position 0 and see only the first key, so they stay finite.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        context_len: torch.Tensor,
    ) -> None:
        super().__init__(kv_cache, slots=slots)
        self.block_table = block_table
        self.places = torch.arange(block_table.shape[0] * kv_cache.block_size, device=slots.device)
        self.positions = positions[:, None]
        self.dead = (self.places >= context_len)[:, None, None]
        self.mask = self.places <= self.positions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:  # noqa: ARG002 (one signature for all)
        """See PooledAttention."""
        mask = self.mask
        scale, sliding_window = scoring
        if sliding_window is not None:
            mask = mask & (self.places > self.positions - sliding_window)
        keys, values = self._gather(self.kv_cache.keys[layer]), self._gather(self.kv_cache.values[layer])
        return attend_causal(q, keys, values, mask, scale)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] -> [width, kv_heads, head_dim], zero past the live length."""
        return blocks[self.block_table].flatten(0, 1).masked_fill_(self.dead, 0)
