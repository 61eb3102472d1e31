"""Attention and its projection in a step of vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from worker.decode_inputs import DecodeViews
from worker.kernels.device import num_sms
from worker.kernels.early_attention import early_attention
from worker.kernels.early_plan import early_plan
from worker.kernels.gemv import gemv_add, gemv_merge_add
from worker.kernels.partials import Partials, empty_partials
from worker.kernels.short_plan import ShortPlan
from worker.kernels.vector_tiles import Tile
from worker.kv_cache import KVCache
from worker.model.fused import layer_layout

if TYPE_CHECKING:
    from worker.model.decoder import Decoder, DecoderLayer


class VectorAttention(Protocol):
    """All layers of one step."""

    def add(self, layer: DecoderLayer, qkv: torch.Tensor, *, residual: torch.Tensor, out: torch.Tensor) -> None:
        """Attend with the projection `qkv` [rows, heads * head_dim] float32, and add what comes out, projected.

        residual [rows, hidden] float32 is added to; `out` [rows, hidden]: the sum in the model's type.
        """


class SharedAttention:
    """Programs share a row's tokens; the output projection merges what they have found."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, inputs: DecodeViews, tile: Tile, arrived: torch.Tensor
    ) -> None:
        self.decoder, self.kv_cache, self.inputs, self.tile, self.arrived = decoder, kv_cache, inputs, tile, arrived
        self.partials = self._partials()

    def add(self, layer: DecoderLayer, qkv: torch.Tensor, *, residual: torch.Tensor, out: torch.Tensor) -> None:
        """See VectorAttention."""
        early_attention(
            qkv,
            layer_layout(layer, self.decoder.rope_table),
            self.kv_cache.keys[layer.index],
            self.kv_cache.values[layer.index],
            self.inputs.block_tables,
            self.partials,
            self.arrived,
        )
        gemv_merge_add(self.partials, layer.o_weight, self.tile, bias=layer.o_bias, residual=residual, out=out)

    def _partials(self) -> Partials:
        config, positions = self.decoder.config, self.inputs.positions
        plan = early_plan(
            rows=len(positions),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            width=self.inputs.block_tables.shape[1] * self.kv_cache.block_size,
            num_sms=num_sms(positions.device),
        )
        heads = {"num_heads": config.num_heads, "head_dim": config.head_dim}
        return empty_partials(positions, plan, **heads, dtype=self.kv_cache.storage.dtype)


class ShortAttention:
    """One program attends over all tokens of a row."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, inputs: DecodeViews, tile: Tile, plan: ShortPlan) -> None:
        self.decoder, self.kv_cache, self.inputs, self.plan = decoder, kv_cache, inputs, plan
        self.tile = plan.projection or tile
        config = decoder.config
        attended = config.num_heads * config.head_dim
        self.attended = decoder.embedding.new_empty(len(inputs.positions), attended)

    def add(self, layer: DecoderLayer, qkv: torch.Tensor, *, residual: torch.Tensor, out: torch.Tensor) -> None:
        """See VectorAttention."""
        from worker.kernels.short_attention import short_attention  # written in Gluon

        short_attention(
            qkv,
            layer_layout(layer, self.decoder.rope_table),
            self.kv_cache.keys[layer.index],
            self.kv_cache.values[layer.index],
            self.inputs.block_tables,
            self.inputs.positions,
            self.plan,
            out=self.attended,
        )
        gemv_add(self.attended, layer.o_weight, self.tile, bias=layer.o_bias, residual=residual, out=out)
