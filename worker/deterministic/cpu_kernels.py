"""The parts of a deterministic step on the CPU around the model's own layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.attention.fixed_order import FixedOrderDecode, FixedOrderPrefill, PromptPart, segment_parts
from worker.attention.prefill import PrefillSegment
from worker.causal_lm import ModelShape, StepAttention
from worker.decode_inputs import DecodeViews
from worker.deterministic.cpu_model import decode_query_rows, verify_attention
from worker.kv_cache import KVCache
from worker.step_kernels import TorchKernels


class CpuFixedOrderKernels(TorchKernels):
    """See worker.step_kernels.StepKernels. A greedy choice needs no order: maxima are exact."""

    can_pack = False  # a graph serves one prompt at a time; eager steps take several as parts

    def __init__(self, kv_cache: KVCache, shape: ModelShape) -> None:
        super().__init__(kv_cache)
        self.query_rows = decode_query_rows(shape)
        self.query_tiles = verify_attention(shape)

    def decode(self, inputs: DecodeViews) -> StepAttention:
        """See StepKernels."""
        block_size = self.kv_cache.block_size
        blocks = inputs.block_tables.gather(1, (inputs.positions // block_size)[:, None]).squeeze(1)
        return FixedOrderDecode(
            self.kv_cache,
            slots=blocks * block_size + inputs.positions % block_size,
            block_tables=inputs.block_tables,
            context_lens=inputs.positions + 1,
            query_rows=self.query_rows,
        )

    def fresh(self, *, slots: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        count = len(slots)
        positions = torch.arange(count, device=slots.device)
        return self._prefill(slots, [PromptPart(0, count, positions, count, count - 1, None)])

    def chunk(
        self, *, slots: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, context_len: torch.Tensor
    ) -> StepAttention:
        """See StepKernels."""
        width = len(block_table) * self.kv_cache.block_size
        return self._prefill(slots, [PromptPart(0, len(slots), positions, context_len, width - 1, block_table)])

    def segments(self, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> StepAttention:
        """See StepKernels."""
        return self._prefill(slots, segment_parts(segments, slots.device))

    def _prefill(self, slots: torch.Tensor, parts: Sequence[PromptPart]) -> StepAttention:
        return FixedOrderPrefill(self.kv_cache, slots=slots, parts=parts, query_tiles=self.query_tiles)
