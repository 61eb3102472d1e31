"""Decode attention: one new token a row against all its cached ones, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from worker.attention.pooled import PooledAttention, Scoring
from worker.kv_cache import KVCache


class PagedDecodeAttention(PooledAttention):
    """Gathers each row's blocks and attends under a length mask. Every shape is fixed by the tensors' shapes.

    Reads `block_tables` [rows, width] int32, `context_lens` [rows] int64 (with the new token) and `slots` [rows] int64.
    What lies past a row's length is set to zero before use: a NaN left by another sequence would survive a mask.
    """

    def __init__(
        self, kv_cache: KVCache, *, slots: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        super().__init__(kv_cache, slots=slots)
        self.block_tables = block_tables
        self.places = torch.arange(block_tables.shape[1] * kv_cache.block_size, device=slots.device)
        self.context_lens = context_lens[:, None]
        live = self.places < self.context_lens
        self.dead = ~live[:, None, :, None]
        self._masks: dict[int | None, torch.Tensor] = {None: live[:, None, None, :]}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:  # noqa: ARG002 (one signature for all)
        """See PooledAttention."""
        rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        # The queries of one KV head share its keys: they take the place of the query length.
        grouped = q.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys, values = self._gather(self.kv_cache.keys[layer]), self._gather(self.kv_cache.values[layer])
        mask = self._mask(scoring.sliding_window)
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scoring.scale)
        return out.reshape(rows, num_heads, head_dim)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] -> this step's [rows, kv_heads, width, head_dim]."""
        gathered = blocks[self.block_tables]
        return gathered.flatten(1, 2).transpose(1, 2).masked_fill_(self.dead, 0)

    def _mask(self, sliding_window: int | None) -> torch.Tensor:
        """[rows, 1, 1, width] bool, made once a step."""
        if sliding_window is not None and sliding_window not in self._masks:
            near = self.places >= self.context_lens - sliding_window
            self._masks[sliding_window] = self._masks[None] & near[:, None, None, :]
        return self._masks[sliding_window]
