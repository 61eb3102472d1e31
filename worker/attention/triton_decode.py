"""Decode attention in one kernel a layer."""

from __future__ import annotations

from typing import Any

import torch

from worker.attention.pooled import ScoredAttention, Scoring
from worker.kernels.decode_attention import decode_attention
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.qkv_layout import QkvLayout
from worker.kv_cache import KVCache


class TritonDecodeAttention(ScoredAttention):
    """Reads `block_tables` [rows, width] int32 and `positions` [rows] int64 of the new tokens. Dead slots are never read."""

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        workspace: DecodeWorkspace,
    ) -> None:
        self.kv_cache = kv_cache
        self.block_tables = block_tables
        self.positions = positions
        self.workspace = workspace

    def step(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See ScoredAttention."""
        return self._attend(layer, (q, k, v), self.positions, **scoring._asdict())

    def attend_qkv(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, layout: QkvLayout) -> torch.Tensor:
        """See worker.model.attend.FusedAttend. `positions` are those this step was made with."""
        return self._attend(layer, layout.split(qkv), positions, layout=layout).flatten(1)

    def _attend(
        self, layer: int, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], positions: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        keys, values = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        return decode_attention(qkv, keys, values, self.block_tables, positions, self.workspace, **how)
