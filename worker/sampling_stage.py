"""The stage after the model: tokens that take more than the likeliest of the bare logits, chosen on the device."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cached_property

import torch

from worker.batch import Batch
from worker.inputs import MAX_PACKED
from worker.kernels.device import has_triton
from worker.sampler import Sampled, sample
from worker.sampling_check import Sample, agrees
from worker.sampling_needs import Need, SampledRow, needs_of_all, row_of
from worker.sampling_table import SamplingTable
from worker.step_kernels import StepKernels, TorchKernels

log = logging.getLogger(__name__)


class SamplingStage:
    """Follows a step over its logits, on the same stream. Rows that only take their likeliest token are no part of it.

    It puts each row's token where the step has left the likeliest one, so the next step can start from it unread.
    """

    def __init__(
        self,
        kernels: StepKernels,
        *,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        last_tokens: torch.Tensor,
    ) -> None:
        self.table = SamplingTable(
            max_rows=max_rows, vocab_size=vocab_size, eos_token_ids=eos_token_ids, last_tokens=last_tokens
        )
        self._may_fuse = _may_fuse(kernels, last_tokens.device)

    @cached_property
    def _fused(self) -> Sample | None:
        """The fused stage, once it has been found to do what the plain one does; or None."""
        if not self._may_fuse:
            return None
        from worker.kernels.sample import sample as fused  # triton takes a second to import

        try:
            if agrees(fused, self.table.vocab_size, self.table.last_tokens.device):
                return fused
            log.error("the fused sampling stage disagrees with the plain one, which takes its place")
        except torch.OutOfMemoryError:
            log.error("no memory to compare the fused sampling stage with the plain one, which takes its place")
        return None

    def prepare(self) -> None:
        """Settle which stage is used: that cannot be found out while a graph is recorded."""
        _ = self._fused

    def rows_of(self, batch: Batch) -> tuple[SampledRow, ...]:
        """The rows of `batch` that it serves. The tokens of a prefill lie past those of decode rows, see DecodeInputs."""
        segments = batch.sampling
        first = self.table.max_rows if batch.phase == "prefill" and len(segments) <= MAX_PACKED else 0
        rows = (row_of(segment.sequence, row, first + row) for row, segment in enumerate(segments))
        return tuple(row for row in rows if row.needs)

    def __call__(self, logits: torch.Tensor, rows: tuple[SampledRow, ...]) -> Sampled:
        """Choose the tokens of `rows`, operation by operation."""
        self.table.fill(rows, len(rows))
        needs, views = needs_of_all(rows), self.table.views(len(rows))
        if self._fused is not None:
            return self._fused(logits, views, needs)
        return sample(logits, views, needs, is_static=False)

    def record(self, logits: torch.Tensor, bucket: int, needs: Need) -> Sampled:
        """What a graph records: choose for the first `bucket` rows of the table, which need no more than `needs`."""
        views = self.table.views(bucket)
        return sample(logits, views, needs) if self._fused is None else self._fused(logits, views, needs)

    def go_through(self, logits: torch.Tensor, bucket: int, needs: Need) -> Sampled | None:
        """What `record` launches if the fused stage is found to agree, which is not asked here; see build_ahead."""
        if not self._may_fuse:
            return None
        from worker.kernels.sample import sample as fused

        return fused(logits, self.table.views(bucket), needs)


def _may_fuse(kernels: StepKernels, device: torch.device) -> bool:
    return type(kernels) is not TorchKernels and device.type == "cuda" and has_triton()
