"""The decoder's forward pass in ten launches a layer and fewer: matrix products, and fused kernels between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from worker.kernels.device import has_gluon, multiplies_in_groups
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.rms_norm import rms_norm
from worker.kernels.silu_mul import silu_mul
from worker.model.attend import FusedAttend
from worker.model.linear import linear

if TYPE_CHECKING:
    from worker.model.decoder import Decoder, DecoderLayer


def fused_forward(
    decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, attend: FusedAttend
) -> torch.Tensor:
    """See Decoder.forward."""
    if has_gluon() and multiplies_in_groups(token_ids.device):
        from worker.model.block_forward import block_forward, prefill_tiles  # written in Gluon

        tiles = prefill_tiles(decoder, len(token_ids))
        if tiles is not None:
            return block_forward(decoder, token_ids, positions, attend, tiles)
    eps = decoder.config.rms_norm_eps
    residual = functional.embedding(token_ids, decoder.embedding)
    normed = rms_norm(residual, decoder.first_norm, eps)
    for layer, next_norm in decoder.layers_and_next_norms():
        qkv = linear(normed, layer.qkv_weight, layer.qkv_bias)
        attended = attend.attend_qkv(layer.index, qkv, positions, layer_layout(layer, decoder.rope_table))
        projected = linear(attended, layer.o_weight, layer.o_bias)
        normed = rms_norm(projected, layer.post_attention_norm, eps, residual=residual)
        gated = silu_mul(linear(normed, layer.gate_up_weight, layer.gate_up_bias))
        normed = rms_norm(linear(gated, layer.down_weight, layer.down_bias), next_norm, eps, residual=residual)
    return normed


def layer_layout(layer: DecoderLayer, rope_table: torch.Tensor) -> QkvLayout:
    """How the layer's fused projection is read."""
    return QkvLayout(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rope_table=rope_table,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        eps=layer.eps,
    )
