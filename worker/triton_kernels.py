"""The parts of a step as fused Triton kernels. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.attention.fixed_prefill import FreshPrefillAttention
from worker.attention.fused_prefill import FusedPrefillAttention
from worker.attention.packed_prefill import PackedPrefillAttention
from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.attention.triton_decode import TritonDecodeAttention
from worker.attention.triton_prefill import TritonPrefillAttention
from worker.causal_lm import CausalLM, StepAttention
from worker.decode_inputs import DecodeViews
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.greedy import RowState, greedy, pick_tokens
from worker.kv_cache import KVCache
from worker.model.decoder import Decoder
from worker.model.vector_step import VectorStep, vector_tiles
from worker.step_kernels import Outputs

WholeStep = Callable[[DecodeViews], Outputs]
MAX_OWN_PROMPT = 1024
"""Longer prompts go through torch's flash attention."""


class TritonKernels:
    """See worker.step_kernels.StepKernels. Steps must follow each other on one stream: they share a workspace."""

    reads_full_width = False
    can_pack = True

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        num_heads: int,
        max_rows: int,
        gemv_rows: int = 0,
        product_rows: int = 0,
        block_rows: int = 0,
    ) -> None:
        self.kv_cache = kv_cache
        self.gemv_rows = gemv_rows
        self.product_rows = product_rows
        self.block_rows = block_rows
        _, _, _, _, num_kv_heads, head_dim = kv_cache.storage.shape
        self.workspace = DecodeWorkspace(
            max_rows=max_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=kv_cache.storage.device,
        )

    def whole_step(self, model: CausalLM, inputs: DecodeViews) -> Outputs | None:
        """See StepKernels."""
        decoder = model.module
        step = self._whole_step(decoder, len(inputs.positions)) if isinstance(decoder, Decoder) else None
        return None if step is None else step(inputs)

    def _whole_step(self, decoder: Decoder, rows: int) -> WholeStep | None:
        config, dtype = decoder.config, decoder.embedding.dtype
        if rows <= self.gemv_rows:
            vector = vector_tiles(config, dtype, rows)
            return None if vector is None else VectorStep(decoder, self.kv_cache, vector, self.workspace.arrived)
        if rows > max(self.product_rows, self.block_rows):
            return None
        from worker.model.block_step import BlockStep, block_tiles  # these two are written in Gluon
        from worker.model.rows_step import RowsStep, row_tiles

        if rows <= self.product_rows:
            tiles = row_tiles(config, dtype, rows)
            return None if tiles is None else RowsStep(decoder, self.kv_cache, tiles, self.workspace)
        blocks = block_tiles(config, dtype, rows)
        return None if blocks is None else BlockStep(decoder, self.kv_cache, blocks, self.workspace)

    def tokens(self, inputs: DecodeViews) -> torch.Tensor:
        """See StepKernels."""
        return pick_tokens(inputs.token_ids, inputs.sources, inputs.last_tokens)

    def decode(self, inputs: DecodeViews) -> StepAttention:
        """See StepKernels."""
        return TritonDecodeAttention(
            self.kv_cache, block_tables=inputs.block_tables, positions=inputs.positions, workspace=self.workspace
        )

    def fresh(self, *, slots: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        made = TritonPrefillAttention if len(slots) <= MAX_OWN_PROMPT else FreshPrefillAttention
        return FusedPrefillAttention(made(self.kv_cache, slots=slots))

    def packed(self, *, slots: torch.Tensor, offsets: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        return FusedPrefillAttention(PackedPrefillAttention(self.kv_cache, slots=slots, offsets=offsets))

    def chunk(
        self,
        *,
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        context_len: torch.Tensor,  # noqa: ARG002 (positions say as much)
    ) -> StepAttention:
        """See StepKernels."""
        return FusedPrefillAttention(
            TritonPrefillAttention(self.kv_cache, slots=slots, positions=positions, block_table=block_table)
        )

    def segments(self, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> StepAttention:
        """See StepKernels."""
        return FusedPrefillAttention(PagedPrefillAttention(self.kv_cache, slots=slots, segments=segments))

    def greedy(self, logits: torch.Tensor) -> Outputs:
        """See StepKernels."""
        return greedy(logits)

    def advance(self, logits: torch.Tensor, inputs: DecodeViews) -> Outputs:
        """See StepKernels."""
        return greedy(logits, RowState.of(inputs), inputs.logits)
