"""The forward pass of a decoder: llama, mistral, qwen2, qwen3.

Tokens of any number of sequences lie side by side in one flat dimension T; positions say where each belongs, and
`Attend` knows which of them see each other. Nothing in here waits for the device or branches on values, so that a
step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from worker.model.architecture import DecoderConfig
from worker.model.attend import Attend, FusedAttend
from worker.model.linear import linear
from worker.model.rope_table import rope_table


class DecoderLayer(nn.Module):
    """One block. Projections that share an input are one matrix: queries, keys, values; gate, up."""

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    qkv_bias: nn.Parameter | None
    o_bias: nn.Parameter | None
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: DecoderConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.intermediate_size, self.eps = config.intermediate_size, config.rms_norm_eps
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        qkv_size = config.qkv_heads * config.head_dim

        def weight(*shape: int) -> nn.Parameter:
            return _weight(*shape, dtype=dtype, device=device)

        self.input_norm = weight(hidden)
        self.qkv_weight = weight(qkv_size, hidden)
        self.qkv_bias = weight(qkv_size) if config.qkv_bias else None
        self.q_norm = weight(config.head_dim) if config.qk_norm else None
        self.k_norm = weight(config.head_dim) if config.qk_norm else None
        self.o_weight = weight(hidden, q_size)
        self.o_bias = weight(hidden) if config.o_bias else None
        self.post_attention_norm = weight(hidden)
        self.gate_up_weight = weight(2 * config.intermediate_size, hidden)
        self.gate_up_bias = weight(2 * config.intermediate_size) if config.mlp_bias else None
        self.down_weight = weight(hidden, config.intermediate_size)
        self.down_bias = weight(hidden) if config.mlp_bias else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [T, hidden], changed in place; cos and sin [T, 1, head_dim], the first half of sin negated."""
        normed = functional.rms_norm(x, x.shape[-1:], self.input_norm, self.eps)
        q, k, v = self._project(normed, cos, sin)
        attended = attend(self.index, q, k, v).reshape(x.shape[0], -1)
        x = x.add_(linear(attended, self.o_weight, self.o_bias))
        normed = functional.rms_norm(x, x.shape[-1:], self.post_attention_norm, self.eps)
        return x.add_(self._feed_forward(normed))

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = linear(x, self.qkv_weight, self.qkv_bias).view(x.shape[0], -1, self.head_dim)
        turned = self.num_heads + self.num_kv_heads
        qk, v = qkv[:, :turned], qkv[:, turned:]
        if self.q_norm is not None and self.k_norm is not None:
            q = functional.rms_norm(qk[:, : self.num_heads], (self.head_dim,), self.q_norm, self.eps)
            k = functional.rms_norm(qk[:, self.num_heads :], (self.head_dim,), self.k_norm, self.eps)
            return _turn(q, cos, sin), _turn(k, cos, sin), v
        qk = _turn(qk, cos, sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = linear(x, self.gate_up_weight, self.gate_up_bias)
        gate, up = gate_up[:, : self.intermediate_size], gate_up[:, self.intermediate_size :]
        return linear(functional.silu(gate).mul_(up), self.down_weight, self.down_bias)


class Decoder(nn.Module):
    """Token ids to hidden states to logits, in the dtype of the weights, which start uninitialised."""

    rope_table: torch.Tensor
    """[max_position_embeddings, head_dim] float32: cosines of the pairs' angles, then sines."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        words = (config.vocab_size, config.hidden_size)
        self.embedding = _weight(*words, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)
        )
        self.final_norm = _weight(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.embedding if config.tie_word_embeddings else _weight(*words, dtype=dtype, device=device)
        self.register_buffer("rope_table", rope_table(config).to(device), persistent=False)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids [T] and positions [T], both int64 -> hidden states [T, hidden], ready for `logits`."""
        if isinstance(attend, FusedAttend):
            from worker.model.fused import fused_forward  # imports triton

            return fused_forward(self, token_ids, positions, attend)
        x = functional.embedding(token_ids, self.embedding)
        cos, sin = self.rope_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        # One multiply and one fused multiply-add a layer: x * cos + swapped halves of x * signed sin.
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return functional.rms_norm(x, x.shape[-1:], self.final_norm, self.config.rms_norm_eps)

    @property
    def first_norm(self) -> torch.Tensor:
        """[hidden]: the weight of the norm between the embedding and the first layer."""
        return self.each_layer()[0].input_norm

    def each_layer(self) -> list[DecoderLayer]:
        """`layers` by their type."""
        return cast("list[DecoderLayer]", list(self.layers))

    def layers_and_next_norms(self) -> Iterator[tuple[DecoderLayer, torch.Tensor]]:
        """Each layer with the weight [hidden] of the norm that what it leaves goes through: the next layer's, or the last."""
        layers = self.each_layer()
        return zip(layers, [*(layer.input_norm for layer in layers[1:]), self.final_norm], strict=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> [N, vocab]."""
        return linear(hidden, self.lm_head)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] turned by its positions' angles, computed in float32 -> the same shape and dtype."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def _weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
