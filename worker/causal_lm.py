"""What a runner needs of a model, whoever implements it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from worker.model.architecture import DecoderConfig
    from worker.model.decoder import Decoder


class StepAttention(Protocol):
    """Attention of one step over the KV pool; see worker.attention for the implementations."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory and limits depend on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelShape:
        """Of a native decoder."""
        return cls(**{size.name: getattr(config, size.name) for size in fields(cls)})


class CausalLM(Protocol):
    """A decoder language model over a flat run of tokens. No shape or branch may depend on a tensor's values."""

    @property
    def shape(self) -> ModelShape:
        """The sizes of its KV cache and its limits."""

    @property
    def module(self) -> nn.Module:
        """Holds the weights."""

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [rows, vocab] of the tokens at `rows` [rows] int64, or of all of them for None.

        `token_ids` and `positions` are [tokens] int64; keys, values and masks are `attend`'s business.
        """


class NativeCausalLM:
    """The native decoder as a CausalLM."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.module: nn.Module = decoder
        self.shape = ModelShape.of(decoder.config)

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See CausalLM."""
        hidden: torch.Tensor = self.decoder(token_ids, positions, attend)
        return self.decoder.logits(hidden if rows is None else hidden[rows])
