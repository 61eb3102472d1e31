"""Fills the static input buffers from a batch: the model's inputs, and the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.batch import Batch, Segment
from worker.block_pool import PADDING_BLOCK
from worker.rng import uniforms
from worker.staging import Staging


class DecodeInputs:
    """One row a sequence. Padding rows are inert: token 0 at position 0, length 1, all in the padding block."""

    def __init__(self, *, max_batch: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        row = ((max_batch,), torch.int64)
        self.staging = Staging(
            {
                "token_ids": row,
                "positions": row,
                "slots": row,
                "context_lens": row,
                "block_tables": ((max_batch, max_blocks), torch.int32),
            },
            device,
        )
        self._pad(slice(0, max_batch))

    def fill(self, batch: Batch) -> None:
        """Write the rows of `batch`, reset the rows up to its bucket, and upload."""
        host = self.staging.host
        for row, segment in enumerate(batch.segments):
            position, table = segment.start, segment.sequence.block_table
            host["token_ids"][row] = segment.sequence.token_ids[position]
            host["positions"][row] = position
            host["slots"][row] = slot(segment, position, self.block_size)
            host["context_lens"][row] = position + 1
            host["block_tables"][row, : len(table)] = table
            host["block_tables"][row, len(table) :] = PADDING_BLOCK
        self._pad(slice(len(batch.segments), batch.bucket))
        self.staging.upload()

    def _pad(self, rows: slice) -> None:
        for name, value in (("token_ids", 0), ("positions", 0), ("slots", 0), ("context_lens", 1)):
            self.staging.host[name][rows] = value
        self.staging.host["block_tables"][rows] = PADDING_BLOCK


class PrefillInputs:
    """A flat run of tokens, segment after segment, and where in it the sampled rows are."""

    def __init__(self, *, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        token = ((max_tokens,), torch.int64)
        self.staging = Staging({"token_ids": token, "positions": token, "slots": token}, device)

    def fill(self, batch: Batch) -> None:
        """Write the tokens of `batch` and upload."""
        host, first = self.staging.host, 0
        for segment in batch.segments:
            span = slice(first, first + segment.count)
            positions = np.arange(segment.start, segment.end)
            table = np.asarray(segment.sequence.block_table)
            host["token_ids"][span] = segment.sequence.token_ids[segment.start : segment.end]
            host["positions"][span] = positions
            host["slots"][span] = table[positions // self.block_size] * self.block_size + positions % self.block_size
            first += segment.count
        self.staging.upload()


class SamplingInputs:
    """The sampler's numbers, one row a sampled token; padding rows are greedy."""

    def __init__(self, *, max_batch: int, device: torch.device) -> None:
        real, whole = ((max_batch,), torch.float32), ((max_batch,), torch.int64)
        self.staging = Staging(
            {"temperature": real, "top_p": real, "min_p": real, "uniform": real, "top_k": whole}, device
        )

    def fill(self, segments: Sequence[Segment], bucket: int) -> None:
        """Write one row for each of `segments`, neutral values up to `bucket`, and upload."""
        host, count = self.staging.host, len(segments)
        params = [segment.sequence.request.sampling for segment in segments]
        host["temperature"][:count] = [0.0 if p.is_greedy else p.temperature for p in params]
        host["top_p"][:count] = [p.top_p for p in params]
        host["min_p"][:count] = [p.min_p for p in params]
        host["top_k"][:count] = [max(p.top_k, 0) for p in params]
        host["uniform"][:count] = uniforms(
            np.array([p.seed for p in params], dtype=np.int64),
            np.array([segment.sequence.index for segment in segments], dtype=np.int64),
            np.array([segment.sequence.num_generated for segment in segments], dtype=np.int64),
        )
        for name, value in (("temperature", 0), ("top_p", 1), ("min_p", 0), ("top_k", 0), ("uniform", 0)):
            host[name][count:bucket] = value
        self.staging.upload()


def slot(segment: Segment, position: int, block_size: int) -> int:
    """Where in the KV pool `position` of the segment's sequence lives."""
    return segment.sequence.block_table[position // block_size] * block_size + position % block_size
