"""Decode attention: one new token a row against all its cached ones, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from worker.kv_cache import KVCache


class PagedDecodeAttention:
    """Gathers each row's blocks and attends under a length mask. Every shape is fixed by the tensors' shapes.

    Reads `block_tables` [rows, width] int32, `context_lens` [rows] int64 (with the new token) and `slots` [rows] int64.
    What lies past a row's length is set to zero before use: a NaN left by another sequence would survive a mask.
    """

    def __init__(
        self, kv_cache: KVCache, *, slots: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        self.kv_cache = kv_cache
        self.slots = slots
        self.block_tables = block_tables
        width = block_tables.shape[1] * kv_cache.block_size
        live = torch.arange(width, device=slots.device) < context_lens[:, None]
        self.mask = live[:, None, None, :]
        self.dead = ~live[:, None, :, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads, head_dim]."""
        self.kv_cache.write(layer, self.slots, k, v)
        rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        # The queries of one KV head share its keys: they take the place of the query length.
        grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = functional.scaled_dot_product_attention(
            grouped,
            self._gather(self.kv_cache.keys[layer]),
            self._gather(self.kv_cache.values[layer]),
            attn_mask=self.mask,
        )
        return out.reshape(rows, num_heads, head_dim)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] -> this step's [rows, kv_heads, width, head_dim]."""
        gathered = blocks[self.block_tables]
        return gathered.flatten(1, 2).transpose(1, 2).masked_fill_(self.dead, 0)
