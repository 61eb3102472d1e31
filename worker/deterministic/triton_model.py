"""The native decoder on CUDA out of fixed-order kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from worker.attention.fixed_order_triton import TritonFixedOrderAttention
from worker.causal_lm import ModelShape, StepAttention
from worker.deterministic.cpu_model import decoder_matrices
from worker.deterministic.row_tiles import RowTiles
from worker.deterministic.verify import equal_tiles
from worker.kernels.build_ahead import build_ahead, can_build_ahead
from worker.kernels.build_processes import BuildProcesses
from worker.kernels.fixed_order_matmul import ROW_TILES, SplitSums, matmul, matmul_gated
from worker.kernels.fixed_order_rows import add_norm, embed_norm
from worker.model.decoder import Decoder
from worker.model.fused import layer_layout


@dataclass(frozen=True, slots=True)
class Products:
    """A decoder's matrix products, in tiles of rows that agree on this device."""

    tiles: Mapping[tuple[int, int], RowTiles]
    """By shape of matrix, (outputs, inputs)."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *, num_splits: int | None = None) -> SplitSums:
        """x [rows, in] -> the product in parts."""
        return matmul(x, weight, row_tile=self._tile(weight, len(x)), num_splits=num_splits)

    def gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """silu(gate) * up [rows, size]."""
        return matmul_gated(x, weight, bias, row_tile=self._tile(weight, len(x)))

    def _tile(self, weight: torch.Tensor, rows: int) -> int:
        sizes = self.tiles[weight.shape[0], weight.shape[1]].sizes
        return next((size for size in sizes if size >= rows), sizes[-1])


class TritonFixedOrderCausalLM:
    """See worker.causal_lm.CausalLM. Attention must be a TritonFixedOrderAttention."""

    def __init__(self, decoder: Decoder, compilers: BuildProcesses | None = None) -> None:
        self.decoder = decoder
        self.module: nn.Module = decoder
        self.shape = ModelShape.of(decoder.config)
        self.products = Products(verify_products(decoder, compilers))

    @torch.inference_mode()
    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See CausalLM."""
        assert isinstance(attend, TritonFixedOrderAttention)
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        residual, normed = embed_norm(token_ids, decoder.embedding, decoder.first_norm, eps)
        for layer, next_norm in decoder.layers_and_next_norms():
            qkv = self.products(normed, layer.qkv_weight)
            layout = layer_layout(layer, decoder.rope_table)
            attended = attend.attend_sums(layer.index, qkv, layer.qkv_bias, positions, layout)
            projected = self.products(attended, layer.o_weight)
            normed = add_norm(projected, layer.o_bias, residual, layer.post_attention_norm, eps)
            gated = self.products.gated(normed, layer.gate_up_weight, layer.gate_up_bias)
            normed = add_norm(self.products(gated, layer.down_weight), layer.down_bias, residual, next_norm, eps)
        chosen = normed if rows is None else normed[rows]
        return self.products(chosen, decoder.lm_head, num_splits=1).parts[0]


def verify_products(decoder: Decoder, compilers: BuildProcesses | None = None) -> Mapping[tuple[int, int], RowTiles]:
    """The row tiles of each shape of matrix. Raises ModelLoadError where there are none."""
    device, dtype = decoder.embedding.device, decoder.embedding.dtype
    generator = torch.Generator().manual_seed(0)
    if device.type == "cuda" and can_build_ahead():
        build_ahead(products_to_go_through(decoder), compilers)
    found: dict[tuple[int, int], RowTiles] = {}
    for weight in decoder_matrices(decoder):
        outputs, inputs = weight.shape
        if (outputs, inputs) not in found:
            rows = torch.randn(ROW_TILES[-1], inputs, generator=generator).to(device, dtype)
            what = f"a product with a matrix of {outputs} x {inputs}"
            found[outputs, inputs] = equal_tiles(ROW_TILES, lambda x, w=weight: _tile_product(x, w), rows, what)  # type: ignore[misc]
    return found


def products_to_go_through(decoder: Decoder) -> Iterator[Callable[[], object]]:
    """One for each shape of matrix and row tile; see build_ahead."""
    for weight in {weight.shape: weight for weight in decoder_matrices(decoder)}.values():
        for size in ROW_TILES:
            yield partial(_tile_product, weight.new_empty(size, weight.shape[1]), weight)


def _tile_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[rows, outputs]; and as gates and ups, for a matrix that may be used so."""
    x = x.contiguous()
    plain = matmul(x, weight, row_tile=len(x)).total()
    if weight.shape[0] % 2:
        return plain
    return torch.cat([plain, matmul_gated(x, weight, None, row_tile=len(x)).float()], dim=1)
