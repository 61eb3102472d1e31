"""How the parts of a step around the model's own layers are computed: in plain torch, or by fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker.attention.decode import PagedDecodeAttention
from worker.attention.fixed_prefill import ChunkPrefillAttention, FreshPrefillAttention
from worker.attention.packed_prefill import PackedPrefillAttention
from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.causal_lm import CausalLM, StepAttention
from worker.config import Kernels
from worker.decode_inputs import DecodeViews
from worker.kernels.device import has_gluon, has_triton, launches_programmatically, multiplies_in_groups
from worker.kv_cache import KVCache

Outputs = tuple[torch.Tensor, torch.Tensor]
"""logits [rows, vocab] float32, and [rows, 2] int64: the greedy token, and 1 where the row is finite."""

GEMV_ROWS = 1
"""Decode steps of up to so many rows are computed by matrix-vector kernels, in which neighbours overlap."""
PRODUCT_ROWS = 8
"""Those of up to so many rows by tensor-core kernels that overlap as well."""
BLOCK_ROWS = 128
"""Those of up to so many rows by kernels that stream blocks of the matrices through shared memory."""


class StepKernels(Protocol):
    """Attention over one KV pool, and greedy tokens."""

    reads_full_width: bool
    """Whether decode attention costs a row the whole width of its tier, however short it is."""
    can_pack: bool
    """Whether there is `packed`."""

    def whole_step(self, model: CausalLM, inputs: DecodeViews) -> Outputs | None:
        """All of worker.decode_step.decode_step, where there are kernels for the whole of such a step; or else None."""

    def tokens(self, inputs: DecodeViews) -> torch.Tensor:
        """[rows] int64: each row's last token, from the host or from the step before."""

    def decode(self, inputs: DecodeViews) -> StepAttention:
        """Attention of one new token a row."""

    def fresh(self, *, slots: torch.Tensor) -> StepAttention:
        """Attention of one prompt from position 0, padded to a bucket."""

    def packed(self, *, slots: torch.Tensor, offsets: torch.Tensor) -> StepAttention:
        """Attention of several prompts from position 0 after one another, padded to a bucket."""

    def chunk(
        self, *, slots: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, context_len: torch.Tensor
    ) -> StepAttention:
        """Attention of a later chunk of one prompt, padded to a bucket."""

    def segments(self, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> StepAttention:
        """Attention of several prompts side by side, with lengths that the host knows."""

    def greedy(self, logits: torch.Tensor) -> Outputs:
        """[rows, vocab] in any type -> Outputs."""

    def advance(self, logits: torch.Tensor, inputs: DecodeViews) -> Outputs:
        """The same, and the inputs are left as the next step over the same rows wants them."""


class TorchKernels:
    """See StepKernels. Runs everywhere, and is what the fused kernels are compared with."""

    reads_full_width = True
    can_pack = True

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache

    def whole_step(self, model: CausalLM, inputs: DecodeViews) -> Outputs | None:  # noqa: ARG002
        """See StepKernels."""
        return None

    def tokens(self, inputs: DecodeViews) -> torch.Tensor:
        """See StepKernels."""
        on_device = inputs.last_tokens[inputs.sources.clamp(min=0)]
        return torch.where(inputs.sources >= 0, on_device, inputs.token_ids)

    def decode(self, inputs: DecodeViews) -> StepAttention:
        """See StepKernels."""
        block_size = self.kv_cache.block_size
        blocks = inputs.block_tables.gather(1, (inputs.positions // block_size)[:, None]).squeeze(1)
        return PagedDecodeAttention(
            self.kv_cache,
            slots=blocks * block_size + inputs.positions % block_size,
            block_tables=inputs.block_tables,
            context_lens=inputs.positions + 1,
        )

    def fresh(self, *, slots: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        return FreshPrefillAttention(self.kv_cache, slots=slots)

    def packed(self, *, slots: torch.Tensor, offsets: torch.Tensor) -> StepAttention:
        """See StepKernels."""
        return PackedPrefillAttention(self.kv_cache, slots=slots, offsets=offsets)

    def chunk(
        self, *, slots: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, context_len: torch.Tensor
    ) -> StepAttention:
        """See StepKernels."""
        return ChunkPrefillAttention(
            self.kv_cache, slots=slots, positions=positions, block_table=block_table, context_len=context_len
        )

    def segments(self, *, slots: torch.Tensor, segments: Sequence[PrefillSegment]) -> StepAttention:
        """See StepKernels."""
        return PagedPrefillAttention(self.kv_cache, slots=slots, segments=segments)

    def greedy(self, logits: torch.Tensor) -> Outputs:
        """See StepKernels."""
        logits = logits.float()
        is_finite = logits.amax(dim=-1).isfinite()
        return logits, torch.stack([logits.argmax(dim=-1), is_finite.long()], dim=-1)

    def advance(self, logits: torch.Tensor, inputs: DecodeViews) -> Outputs:
        """See StepKernels."""
        logits, packed = self.greedy(logits)
        inputs.last_tokens[: len(packed)].copy_(packed[:, 0])
        inputs.positions.add_(inputs.live)
        inputs.sources.copy_(inputs.rows)
        return logits, packed


def choose_kernels(
    choice: Kernels,
    kv_cache: KVCache,
    *,
    num_heads: int,
    max_rows: int,
    gemv_rows: int | None = None,
    product_rows: int | None = None,
    block_rows: int | None = None,
) -> StepKernels:
    """ "auto" takes Triton on CUDA where it is installed. Raises ValueError for a choice that cannot work here.

    `max_rows` is the largest decode bucket; up to `gemv_rows` rows go through matrix-vector kernels where they apply,
    more, up to `product_rows` and then `block_rows`, through the tensor-core kernels for a few rows and for dozens.
    None = GEMV_ROWS, PRODUCT_ROWS and BLOCK_ROWS on a GPU that can overlap their launches (Hopper and later), without
    which they do not pay; else 0. The kernels for dozens of rows need Hopper itself.
    """
    device = kv_cache.storage.device
    is_cuda = device.type == "cuda"
    if choice == "triton" and not (is_cuda and has_triton()):
        raise ValueError("kernels is 'triton', which needs a CUDA device and the triton package")
    if choice == "torch" or not (is_cuda and has_triton()):
        return TorchKernels(kv_cache)
    from worker.triton_kernels import TritonKernels  # triton takes a second to import

    overlaps = launches_programmatically(device)
    if gemv_rows is None:
        gemv_rows = GEMV_ROWS if overlaps else 0
    if product_rows is None:
        product_rows = PRODUCT_ROWS if overlaps and has_gluon() else 0
    if block_rows is None:
        block_rows = BLOCK_ROWS if multiplies_in_groups(device) and has_gluon() else 0
    return TritonKernels(
        kv_cache,
        num_heads=num_heads,
        max_rows=max_rows,
        gemv_rows=gemv_rows,
        product_rows=product_rows,
        block_rows=block_rows,
    )
