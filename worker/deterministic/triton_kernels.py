"""The parts of a deterministic step on CUDA around the model's own layers. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.attention.fixed_order_triton import TritonFixedOrderAttention
from worker.attention.prefill import PrefillSegment
from worker.causal_lm import CausalLM, StepAttention
from worker.decode_inputs import DecodeViews
from worker.kernels.device import num_sms
from worker.kernels.fixed_order_attention import QueryTables, SplitWorkspace
from worker.kernels.greedy import RowState, greedy, pick_tokens
from worker.kv_cache import KVCache
from worker.step_kernels import Outputs

_PROGRAMS_AN_SM = 2
"""Programs of whole rows that keep a multiprocessor busy: with more, splits need none of their own."""


class TritonFixedOrderKernels:
    """See worker.step_kernels.StepKernels. Greedy choices are as in the fast mode: maxima are exact.

    Steps must follow each other on one stream: they share a workspace.
    """

    reads_full_width = False
    can_pack = False

    def __init__(self, kv_cache: KVCache, *, num_heads: int, max_rows: int, max_tokens: int) -> None:
        """`max_rows` is the largest decode bucket, `max_tokens` the longest sequence."""
        self.kv_cache = kv_cache
        _, _, _, _, num_kv_heads, head_dim = kv_cache.storage.shape
        device = kv_cache.storage.device
        self.num_kv_heads = num_kv_heads
        self.splits = SplitWorkspace(
            max_partials=min(max_rows * num_kv_heads, max(_PROGRAMS_AN_SM * num_sms(device), num_kv_heads)),
            max_tokens=max_tokens,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            device=device,
        )

    def whole_step(self, model: CausalLM, inputs: DecodeViews) -> Outputs | None:  # noqa: ARG002
        """See StepKernels: matrix-vector kernels sum in an order of their own."""
        return None

    def tokens(self, inputs: DecodeViews) -> torch.Tensor:
        """See StepKernels."""
        return pick_tokens(inputs.token_ids, inputs.sources, inputs.last_tokens)

    def decode(self, inputs: DecodeViews) -> StepAttention:
        """See StepKernels."""
        tables = self._tables(inputs.positions, inputs.block_tables)
        rows = len(inputs.positions)
        has_splits = tables.num_splits > 1 and rows * self.num_kv_heads <= self.splits.max_partials
        return TritonFixedOrderAttention(
            self.kv_cache, runs=[(slice(0, rows), tables)], workspace=self.splits if has_splits else None
        )

    def fresh(self, *, slots: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        # Whole from position 0, so that the slots are a table of blocks of one token.
        tables = QueryTables(
            positions=torch.arange(len(slots), device=slots.device), block_tables=slots.int(), block_size=1
        )
        return self._prefill(slots, [(slice(0, len(slots)), tables)])

    def chunk(
        self, *, slots: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, context_len: torch.Tensor
    ) -> StepAttention:
        """See StepKernels. No key past a row's own position is looked at, so `context_len` is not needed."""
        del context_len
        return self._prefill(slots, [(slice(0, len(slots)), self._tables(positions, block_table))])

    def segments(self, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> StepAttention:
        """See StepKernels."""
        runs = []
        for segment in segments:
            positions = torch.arange(segment.start, segment.start + segment.count, device=slots.device)
            span = slice(segment.first, segment.first + segment.count)
            runs.append((span, self._tables(positions, segment.block_table)))
        return self._prefill(slots, runs)

    def packed(self, *, slots: torch.Tensor, offsets: torch.Tensor) -> StepAttention:  # noqa: ARG002
        """See StepKernels: `can_pack` says that there is none."""
        raise TypeError("fixed-order attention has no packed prompts")

    def greedy(self, logits: torch.Tensor) -> Outputs:
        """See StepKernels."""
        return greedy(logits)

    def advance(self, logits: torch.Tensor, inputs: DecodeViews) -> Outputs:
        """See StepKernels."""
        return greedy(logits, RowState.of(inputs), inputs.logits)

    def _tables(self, positions: torch.Tensor, block_tables: torch.Tensor) -> QueryTables:
        return QueryTables(positions=positions, block_tables=block_tables, block_size=self.kv_cache.block_size)

    def _prefill(self, slots: torch.Tensor, runs: list[tuple[slice, QueryTables]]) -> StepAttention:
        return TritonFixedOrderAttention(self.kv_cache, runs=runs, slots=slots)
