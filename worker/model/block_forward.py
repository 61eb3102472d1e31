"""The forward pass of a short prompt, or of a few rows, through the kernels that stream blocks of the matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from worker.kernels.block_product import block_gated, block_parts
from worker.kernels.rms_norm import rms_norm, rms_norm_parts
from worker.model.attend import FusedAttend
from worker.model.block_step import BlockTiles, block_tiles
from worker.model.fused import layer_layout

if TYPE_CHECKING:
    from worker.model.decoder import Decoder

MAX_TOKENS = 128
"""From more tokens on a matrix product is bound by arithmetic, and cuBLAS is faster."""


def prefill_tiles(decoder: Decoder, num_tokens: int) -> BlockTiles | None:
    """None where this way does not apply or does not pay."""
    return block_tiles(decoder.config, decoder.embedding.dtype, num_tokens) if num_tokens <= MAX_TOKENS else None


def block_forward(
    decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, attend: FusedAttend, tiles: BlockTiles
) -> torch.Tensor:
    """See Decoder.forward."""
    config, tokens = decoder.config, len(token_ids)
    eps = config.rms_norm_eps
    residual = functional.embedding(token_ids, decoder.embedding)
    x = rms_norm(residual, decoder.first_norm, eps)
    projected = x.new_empty(tiles.o.parts, tokens, config.hidden_size, dtype=torch.float32)
    lowered = x.new_empty(tiles.down.parts, tokens, config.hidden_size, dtype=torch.float32)
    gated = x.new_empty(tokens, config.intermediate_size)
    for layer, next_norm in decoder.layers_and_next_norms():
        # Attention may keep the projection of one layer while the next is computed.
        qkv = x.new_empty(1, tokens, config.qkv_heads * config.head_dim)
        block_parts(x, layer.qkv_weight, tiles.qkv, bias=layer.qkv_bias, out=qkv)
        attended = attend.attend_qkv(layer.index, qkv[0], positions, layer_layout(layer, decoder.rope_table))
        block_parts(attended, layer.o_weight, tiles.o, bias=layer.o_bias, out=projected)
        rms_norm_parts(projected, layer.post_attention_norm, eps, residual=residual, out=x)
        block_gated(x, layer.gate_up_weight, tiles.gate_up, bias=layer.gate_up_bias, out=gated)
        block_parts(gated, layer.down_weight, tiles.down, bias=layer.down_bias, out=lowered)
        rms_norm_parts(lowered, next_norm, eps, residual=residual, out=x)
    return x
