"""Attention of a decode step for some rows, whose results one matrix product reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.decode_inputs import DecodeViews
from worker.kernels.decode_attention import decode_attention
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.device import num_sms
from worker.kernels.early_attention import early_attention
from worker.kernels.early_plan import SHORT_TIER, rows_plan
from worker.kernels.partials import Partials, empty_partials
from worker.kv_cache import KVCache
from worker.model.fused import layer_layout

if TYPE_CHECKING:
    from worker.model.decoder import Decoder, DecoderLayer


_MIDDLE_TIER = 4 * SHORT_TIER
"""Between kernels that want no shared memory, the attention that wants much pays from here on only."""


class RowsAttention:
    """All layers of one step. In short tiers keys are asked for before the wait; in long ones they are streamed."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        workspace: DecodeWorkspace,
        inputs: DecodeViews,
        *,
        spare_shared: bool,
    ) -> None:
        self.rope_table = decoder.rope_table
        self.kv_cache = kv_cache
        self.workspace = workspace
        self.inputs = inputs
        width = inputs.block_tables.shape[1] * kv_cache.block_size
        is_early = width <= (_MIDDLE_TIER if spare_shared else SHORT_TIER)
        config = decoder.config
        self.partials: Partials | None = None
        self.qkv = inputs.positions.new_empty(
            len(inputs.positions),
            config.qkv_heads * config.head_dim,
            dtype=torch.float32 if is_early else kv_cache.storage.dtype,
        )
        """[rows, heads * head_dim], for every layer's projection."""
        if is_early:
            plan = rows_plan(
                rows=len(inputs.positions),
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                width=width,
                num_sms=num_sms(inputs.positions.device),
                spare_shared=spare_shared,
            )
            heads = {"num_heads": config.num_heads, "head_dim": config.head_dim}
            self.partials = empty_partials(inputs.positions, plan, **heads, dtype=kv_cache.storage.dtype)

    def __call__(self, layer: DecoderLayer) -> torch.Tensor:
        """Attend with the projection in `qkv`, which is kept -> [rows, heads * head_dim]."""
        keys, values = self.kv_cache.keys[layer.index], self.kv_cache.values[layer.index]
        layout, tables = layer_layout(layer, self.rope_table), self.inputs.block_tables
        if self.partials is not None:
            early_attention(self.qkv, layout, keys, values, tables, self.partials, self.workspace.arrived)
            return self.partials.sums[:, 0].flatten(1)
        qkv, positions = layout.split(self.qkv), self.inputs.positions
        return decode_attention(qkv, keys, values, tables, positions, self.workspace, layout=layout).flatten(1)
