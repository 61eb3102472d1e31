"""How one row of a fused query-key-value projection is to be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QkvLayout:
    """Heads of `head_dim` numbers: queries, then keys, then values; and what is done to queries and keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_table: torch.Tensor
    """[positions, head_dim] float32: cosines of the pairs' angles, then sines."""
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    """[head_dim] weights of the norm of every query or key head, before it is turned; both or neither."""
    eps: float = 0.0
    """Of those norms."""

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [tokens, heads * head_dim] -> views: q [tokens, num_heads, head_dim], k and v with num_kv_heads."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return q, k, v
