"""One decode step as a function of static tensors: eager runs call it, graphs are recordings of it."""

from __future__ import annotations

import torch

from worker.attention.decode import PagedDecodeAttention
from worker.causal_lm import CausalLM
from worker.decode_inputs import DecodeViews
from worker.kv_cache import KVCache

Outputs = tuple[torch.Tensor, torch.Tensor]
"""logits [rows, vocab] float32, and [rows, 2] int64: the greedy token, and 1 where the row is finite."""


def decode_step(model: CausalLM, kv_cache: KVCache, inputs: DecodeViews) -> Outputs:
    """Compute the rows' next tokens, and leave the inputs as the next step over the same rows wants them."""
    on_device = inputs.last_tokens[inputs.sources.clamp(min=0)]
    token_ids = torch.where(inputs.sources >= 0, on_device, inputs.token_ids)
    blocks = inputs.block_tables.gather(1, (inputs.positions // kv_cache.block_size)[:, None]).squeeze(1)
    attend = PagedDecodeAttention(
        kv_cache,
        slots=blocks * kv_cache.block_size + inputs.positions % kv_cache.block_size,
        block_tables=inputs.block_tables,
        context_lens=inputs.positions + 1,
    )
    logits, packed = with_greedy(model.compute(token_ids, inputs.positions, attend, None))
    inputs.last_tokens[: len(packed)].copy_(packed[:, 0])
    inputs.positions.add_(inputs.live)
    inputs.sources.copy_(inputs.rows)
    return logits, packed


def with_greedy(logits: torch.Tensor) -> Outputs:
    """[rows, vocab] in any dtype -> Outputs."""
    logits = logits.float()
    is_finite = logits.amax(dim=-1).isfinite()
    return logits, torch.stack([logits.argmax(dim=-1), is_finite.long()], dim=-1)
