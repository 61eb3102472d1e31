"""A whole decode step for a few rows, in five launches a layer that overlap each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.decode_inputs import DecodeViews
from worker.kernels.device import has_gluon
from worker.kernels.gemv import Norm, gemv, gemv_add, gemv_gated, gemv_logits
from worker.kernels.greedy import RowState, choose_best
from worker.kernels.short_plan import short_plan
from worker.kernels.token_rows import embed_tokens
from worker.kernels.vector_tiles import Tile, tile_for
from worker.kv_cache import KVCache
from worker.model.matrix_tiles import MatrixTiles, matrix_tiles
from worker.model.vector_attention import SharedAttention, ShortAttention, VectorAttention
from worker.step_kernels import Outputs

if TYPE_CHECKING:
    from worker.model.architecture import DecoderConfig
    from worker.model.decoder import Decoder


def vector_tiles(config: DecoderConfig, dtype: torch.dtype, rows: int) -> MatrixTiles[Tile] | None:
    """The tiles for steps of `rows` rows; None where this way of computing them does not apply."""
    tiles = matrix_tiles(config, dtype, lambda kind, size, out: tile_for(kind, size, out, rows))
    # The output projection merges whole heads.
    return tiles if tiles is not None and tiles.o.chunk >= config.head_dim else None


class VectorStep:
    """A decoder's steps over one pool. They must follow each other on one stream."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, tiles: MatrixTiles[Tile], arrived: torch.Tensor) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.tiles = tiles
        self.arrived = arrived
        """[at least rows * kv_heads] int32, zero between launches."""

    def __call__(self, inputs: DecodeViews) -> Outputs:
        """See worker.decode_step.decode_step."""
        decoder, config = self.decoder, self.decoder.config
        rows = len(inputs.positions)
        vectors = embed_tokens(inputs.token_ids, inputs.sources, inputs.last_tokens, decoder.embedding)
        x, residual = vectors.x, vectors.residual
        attention = self._attention(inputs)
        qkv = residual.new_empty(rows, config.qkv_heads * config.head_dim)
        gated = x.new_empty(rows, config.intermediate_size)
        for layer in decoder.each_layer():
            norm = Norm(weight=layer.input_norm, eps=layer.eps)
            gemv(x, layer.qkv_weight, self.tiles.qkv, norm=norm, bias=layer.qkv_bias, out=qkv)
            attention.add(layer, qkv, residual=residual, out=x)
            norm = Norm(weight=layer.post_attention_norm, eps=layer.eps)
            gemv_gated(x, layer.gate_up_weight, self.tiles.gate_up, norm=norm, bias=layer.gate_up_bias, out=gated)
            gemv_add(gated, layer.down_weight, self.tiles.down, bias=layer.down_bias, residual=residual, out=x)
        logits = inputs.logits_buffer(config.vocab_size)
        norm = Norm(weight=decoder.final_norm, eps=config.rms_norm_eps)
        gemv_logits(x, decoder.lm_head, self.tiles.head, norm=norm, out=logits, best=vectors.best)
        return logits, choose_best(vectors.best[:, None], logits, RowState.of(inputs))

    def _attention(self, inputs: DecodeViews) -> VectorAttention:
        config, width = self.decoder.config, inputs.block_tables.shape[1] * self.kv_cache.block_size
        plan = short_plan(config.num_heads, config.num_kv_heads, config.head_dim, width=width)
        if plan is not None and len(inputs.positions) == 1 and has_gluon():
            return ShortAttention(self.decoder, self.kv_cache, inputs, self.tiles.o, plan)
        return SharedAttention(self.decoder, self.kv_cache, inputs, self.tiles.o, self.arrived)
