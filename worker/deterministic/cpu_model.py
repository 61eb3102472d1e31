"""The native decoder on the CPU, every row by itself as far as its bits are concerned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional

from worker.attention.fixed_order import KEY_TILE, FoldedKeys, key_scores
from worker.causal_lm import ModelShape, StepAttention
from worker.deterministic.cpu_product import PRODUCT_ROWS, product, tile_product
from worker.deterministic.exact import rms_norm, silu_mul, turn
from worker.deterministic.row_tiles import RowTiles
from worker.deterministic.verify import equal_tiles
from worker.errors import ModelLoadError
from worker.model.decoder import Decoder, DecoderLayer

QUERY_TOKENS = (16, 128)
"""Tokens of a prompt whose queries are computed together, at most these."""


class CpuFixedOrderCausalLM:
    """See worker.causal_lm.CausalLM. Attention must be of worker.attention.fixed_order."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.module: nn.Module = decoder
        self.shape = ModelShape.of(decoder.config)
        self.tiles = verify_products(decoder)
        """Of each shape of matrix, (outputs, inputs)."""

    @torch.inference_mode()
    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See CausalLM."""
        x = functional.embedding(token_ids, self.decoder.embedding)
        cos, sin = self.decoder.rope_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        for layer in self.decoder.each_layer():
            x = x + self._attend(layer, rms_norm(x, layer.input_norm, layer.eps), cos, sin, attend)
            x = x + self._feed_forward(layer, rms_norm(x, layer.post_attention_norm, layer.eps))
        x = x if rows is None else x[rows]
        normed = rms_norm(x, self.decoder.final_norm, self.decoder.config.rms_norm_eps)
        return self._linear(normed, self.decoder.lm_head, None)

    def _attend(
        self, layer: DecoderLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: StepAttention
    ) -> torch.Tensor:
        qkv = self._linear(x, layer.qkv_weight, layer.qkv_bias).view(len(x), -1, layer.head_dim)
        q, k, v = qkv.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
        attended = attend(layer.index, turn(q, cos, sin), turn(k, cos, sin), v)
        return self._linear(attended.flatten(1), layer.o_weight, layer.o_bias)

    def _feed_forward(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        gated = silu_mul(self._linear(x, layer.gate_up_weight, layer.gate_up_bias))
        return self._linear(gated, layer.down_weight, layer.down_bias)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = product(x, weight, self.tiles[weight.shape[0], weight.shape[1]])
        return out if bias is None else out + bias


def decode_query_rows(shape: ModelShape) -> int:
    """Rows that the queries of one key head are padded to in a decode step."""
    return -(-shape.num_heads // shape.num_kv_heads // PRODUCT_ROWS[0]) * PRODUCT_ROWS[0]


def verify_products(decoder: Decoder) -> Mapping[tuple[int, int], RowTiles]:
    """The row tiles of each shape of matrix. Raises ModelLoadError where there are none."""
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[int, int], RowTiles] = {}
    for weight in decoder_matrices(decoder):
        outputs, inputs = weight.shape
        if (outputs, inputs) not in found:
            # The last layer's product is of few rows ever.
            sizes = PRODUCT_ROWS[:5] if weight is decoder.lm_head else PRODUCT_ROWS
            rows = torch.randn(sizes[-1], inputs, generator=generator)
            what = f"a product with a matrix of {outputs} x {inputs}"
            found[outputs, inputs] = equal_tiles(sizes, lambda x, w=weight: tile_product(x, w), rows, what)  # type: ignore[misc]
    return found


def verify_attention(shape: ModelShape) -> RowTiles:
    """The tiles of prompt tokens for attention. Raises ModelLoadError where decode and prefill would differ."""
    generator = torch.Generator().manual_seed(0)
    group = shape.num_heads // shape.num_kv_heads
    keys, values = torch.randn(2, 1, KEY_TILE, shape.head_dim, generator=generator)
    sizes = (decode_query_rows(shape), *(tokens * group for tokens in QUERY_TOKENS))
    rows = torch.randn(sizes[-1], shape.head_dim, generator=generator)
    tiles = equal_tiles(sizes, lambda x: _attended(x, keys, values), rows, "attention")
    if len(tiles.sizes) == 1:
        raise ModelLoadError("deterministic is on, but on this device attention rounds a query by its neighbours")
    return RowTiles(tuple(size // group for size in tiles.sizes[1:]))


def _attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One fold; NaN, which equals nothing, where the number of products beside it matters."""
    results = []
    for batch in (1, 2, 7):
        many = [tensor.expand(batch, -1, -1).contiguous() for tensor in (queries, keys, values)]
        folded = FoldedKeys()
        folded.fold(key_scores(many[0], many[1]), many[2])
        results += [*folded.result()]
    agree = all(torch.equal(result, results[0]) for result in results)
    return results[0] if agree else torch.full_like(results[0], torch.nan)


def decoder_matrices(decoder: Decoder) -> Iterator[torch.Tensor]:
    """All that rows are multiplied with."""
    for layer in decoder.layers:
        for name in ("qkv_weight", "o_weight", "gate_up_weight", "down_weight"):
            yield getattr(layer, name)
    yield decoder.lm_head
