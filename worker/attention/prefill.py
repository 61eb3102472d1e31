"""Prefill attention: the new tokens of each segment against themselves and what the pool already holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.attention.pooled import PooledAttention, Scoring
from worker.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Tokens [first, first + count) of the step are positions [start, start + count) of one sequence."""

    first: int
    start: int
    count: int
    block_table: torch.Tensor
    """[blocks of the sequence up to start + count] int32."""


class PagedPrefillAttention(PooledAttention):
    """Causal attention segment by segment, with lengths known to the host; exact, not padded."""

    def __init__(self, kv_cache: KVCache, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> None:
        super().__init__(kv_cache, slots=slots)
        self.segments = segments
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See PooledAttention."""
        out = q.new_empty(q.shape)
        for segment, mask in zip(self.segments, self._masks_for(scoring.sliding_window), strict=True):
            span = slice(segment.first, segment.first + segment.count)
            keys, values = k[span], v[span]
            if segment.start:
                keys = self._read(self.kv_cache.keys[layer], segment)
                values = self._read(self.kv_cache.values[layer], segment)
            out[span] = attend_causal(q[span], keys, values, mask, scoring.scale)
        return out

    def _read(self, blocks: torch.Tensor, segment: PrefillSegment) -> torch.Tensor:
        return blocks[segment.block_table].flatten(0, 1)[: segment.start + segment.count]

    def _masks_for(self, sliding_window: int | None) -> list[torch.Tensor | None]:
        """One mask a segment, made once a step."""
        if sliding_window not in self._masks:
            self._masks[sliding_window] = [
                _causal_mask(segment, sliding_window, self.slots.device) for segment in self.segments
            ]
        return self._masks[sliding_window]


def _causal_mask(segment: PrefillSegment, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """[count, start + count] bool; None for what is plainly causal from position 0."""
    is_windowed = sliding_window is not None and sliding_window < segment.start + segment.count
    if segment.start == 0 and not is_windowed:
        return None
    ones = torch.ones(segment.count, segment.start + segment.count, dtype=torch.bool, device=device)
    mask = ones.tril(diagonal=segment.start)
    return mask if not is_windowed else mask.triu_(diagonal=segment.start - sliding_window + 1)  # type: ignore[operator]


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """[tokens, heads, head_dim] each -> the same; fewer key than query heads are repeated. No mask: causal."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.squeeze(0).transpose(0, 1)
