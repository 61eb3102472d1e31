"""A whole decode step for some dozens of rows, in seven launches a layer that overlap each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.decode_inputs import DecodeViews
from worker.kernels.block_product import block_gated, block_logits, block_parts
from worker.kernels.block_tiles import MAX_ROWS, BlockTile, block_tile_for
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.greedy import RowState, choose_best
from worker.kernels.rms_norm import rms_norm_parts
from worker.kernels.token_rows import embed_tokens
from worker.kv_cache import KVCache
from worker.model.matrix_tiles import MatrixTiles, matrix_tiles
from worker.model.rows_attention import RowsAttention
from worker.step_kernels import Outputs

if TYPE_CHECKING:
    from worker.model.architecture import DecoderConfig
    from worker.model.decoder import Decoder

BlockTiles = MatrixTiles[BlockTile]


def block_tiles(config: DecoderConfig, dtype: torch.dtype, rows: int) -> BlockTiles | None:
    """The tiles for steps of `rows` rows; None where this way of computing them does not apply."""
    if rows > MAX_ROWS:
        return None
    return matrix_tiles(config, dtype, lambda kind, size, out: block_tile_for(kind, size, out, rows))


class BlockStep:
    """A decoder's steps over one pool. They must follow each other on one stream."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, tiles: BlockTiles, workspace: DecodeWorkspace) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.tiles = tiles
        self.workspace = workspace

    def __call__(self, inputs: DecodeViews) -> Outputs:
        """See worker.decode_step.decode_step."""
        decoder, config, tiles = self.decoder, self.decoder.config, self.tiles
        rows, eps = len(inputs.positions), config.rms_norm_eps
        words = embed_tokens(
            inputs.token_ids, inputs.sources, inputs.last_tokens, decoder.embedding,
            scale=decoder.first_norm, eps=eps,
        )  # fmt: skip
        x, residual = words.x, words.residual
        attention = RowsAttention(decoder, self.kv_cache, self.workspace, inputs, spare_shared=False)
        projected = residual.new_empty(tiles.o.parts, rows, config.hidden_size)
        lowered = residual.new_empty(tiles.down.parts, rows, config.hidden_size)
        gated = x.new_empty(rows, config.intermediate_size)
        for layer, next_norm in decoder.layers_and_next_norms():
            block_parts(x, layer.qkv_weight, tiles.qkv, bias=layer.qkv_bias, out=attention.qkv[None])
            block_parts(attention(layer), layer.o_weight, tiles.o, bias=layer.o_bias, out=projected)
            rms_norm_parts(projected, layer.post_attention_norm, eps, residual=residual, out=x)
            block_gated(x, layer.gate_up_weight, tiles.gate_up, bias=layer.gate_up_bias, out=gated)
            block_parts(gated, layer.down_weight, tiles.down, bias=layer.down_bias, out=lowered)
            rms_norm_parts(lowered, next_norm, eps, residual=residual, out=x)
        logits = inputs.logits_buffer(config.vocab_size)
        block_logits(x, decoder.lm_head, tiles.head, out=logits, best=words.best)
        return logits, choose_best(words.best[:, None], logits, RowState.of(inputs))
