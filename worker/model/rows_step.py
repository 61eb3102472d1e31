"""A whole decode step for some rows on tensor cores, in five launches a layer that overlap each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.decode_inputs import DecodeViews
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.greedy import RowState, choose_best
from worker.kernels.row_tiles import MAX_ROWS, RowTile, columns_for, row_tile_for
from worker.kernels.rows_product import ScaledRows, rows_add, rows_gated, rows_logits, rows_plain
from worker.kernels.token_rows import TokenRows, embed_tokens
from worker.kv_cache import KVCache
from worker.model.matrix_tiles import MatrixTiles, matrix_tiles
from worker.model.rows_attention import RowsAttention
from worker.step_kernels import Outputs

if TYPE_CHECKING:
    from worker.model.architecture import DecoderConfig
    from worker.model.decoder import Decoder


def row_tiles(config: DecoderConfig, dtype: torch.dtype, rows: int) -> MatrixTiles[RowTile] | None:
    """The tiles for steps of `rows` rows; None where this way of computing them does not apply."""
    if rows > MAX_ROWS:
        return None
    return matrix_tiles(config, dtype, lambda kind, size, out: row_tile_for(kind, size, out, rows))


class RowsStep:
    """A decoder's steps over one pool. They must follow each other on one stream."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, tiles: MatrixTiles[RowTile], workspace: DecodeWorkspace
    ) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.tiles = tiles
        self.workspace = workspace

    def __call__(self, inputs: DecodeViews) -> Outputs:
        """See worker.decode_step.decode_step."""
        decoder, config, tiles = self.decoder, self.decoder.config, self.tiles
        rows, eps = len(inputs.positions), config.rms_norm_eps
        words = self._embed(inputs)
        residual, x = words.residual, ScaledRows(x=words.x, squares=words.squares)
        after_o, after_down = self._scaled_like(words.x, tiles.o), self._scaled_like(words.x, tiles.down)
        attention = RowsAttention(decoder, self.kv_cache, self.workspace, inputs, spare_shared=True)
        gated = words.x.new_empty(rows, config.intermediate_size)
        for layer, next_norm in decoder.layers_and_next_norms():
            rows_plain(x, layer.qkv_weight, tiles.qkv, eps=eps, bias=layer.qkv_bias, out=attention.qkv)
            rows_add(
                attention(layer), layer.o_weight, tiles.o, bias=layer.o_bias,
                residual=residual, scale=layer.post_attention_norm, out=after_o,
            )  # fmt: skip
            rows_gated(after_o, layer.gate_up_weight, tiles.gate_up, eps=eps, bias=layer.gate_up_bias, out=gated)
            rows_add(
                gated, layer.down_weight, tiles.down, bias=layer.down_bias,
                residual=residual, scale=next_norm, out=after_down,
            )  # fmt: skip
            x = after_down
        logits = inputs.logits_buffer(config.vocab_size)
        rows_logits(x, decoder.lm_head, tiles.head, eps=eps, out=logits, best=words.best)
        return logits, choose_best(words.best[:, None], logits, RowState.of(inputs))

    def _embed(self, inputs: DecodeViews) -> TokenRows:
        return embed_tokens(
            inputs.token_ids,
            inputs.sources,
            inputs.last_tokens,
            self.decoder.embedding,
            scale=self.decoder.first_norm,
            columns=columns_for(len(inputs.positions)),
        )

    @staticmethod
    def _scaled_like(x: torch.Tensor, tile: RowTile) -> ScaledRows:
        """Room for what the product with `tile` leaves for a norm."""
        parts = -(-x.shape[1] // tile.out)
        squares = x.new_empty(parts, columns_for(len(x)), dtype=torch.float32)
        return ScaledRows(x=torch.empty_like(x), squares=squares)
