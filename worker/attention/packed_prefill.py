"""Prefill attention of several whole prompts in one run of tokens, in a shape that does not depend on their lengths."""

from __future__ import annotations

import torch

from worker.attention.pooled import PooledAttention, Scoring
from worker.attention.prefill import attend_causal
from worker.kv_cache import KVCache

_FLASH_TYPES = (torch.float16, torch.bfloat16)


class PackedPrefillAttention(PooledAttention):
    """Prompts from position 0 after one another; each token sees the earlier ones of its own prompt.

    Reads `offsets` [prompts + 1] int32: where each begins, ascending from 0, and the number of all tokens at the end.
    Padding is one more prompt; prompts of no tokens may follow.
    """

    def __init__(self, kv_cache: KVCache, *, slots: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__(kv_cache, slots=slots)
        self.offsets = offsets
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:  # noqa: ARG002 (one signature for all)
        """See PooledAttention."""
        if q.is_cuda and q.dtype in _FLASH_TYPES:
            return self._flash(q, k, v, *scoring)
        scale, sliding_window = scoring
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._mask(len(q), sliding_window)
        return attend_causal(q, k, v, self._masks[sliding_window], scale)

    def _flash(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, sliding_window: int | None
    ) -> torch.Tensor:
        """torch's flash attention over prompts of any lengths; what it launches depends on the number of tokens alone."""
        window = {} if sliding_window is None else {"window_size_left": sliding_window - 1, "window_size_right": 0}
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, self.offsets, self.offsets, len(q), len(q), 0.0, True, False, scale=scale, **window
        )
        out: torch.Tensor = found[0]
        return out

    def _mask(self, count: int, sliding_window: int | None) -> torch.Tensor:
        """[count, count] bool: causal within each prompt."""
        places = torch.arange(count, device=self.offsets.device)
        prompts = torch.searchsorted(self.offsets[1:].contiguous(), places, right=True)
        distance = places[:, None] - places
        mask = (prompts[:, None] == prompts) & (distance >= 0)
        return mask if sliding_window is None else mask & (distance < sliding_window)
