"""Fills the static input buffers of a prefill from a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.batch import Batch
from worker.block_pool import PADDING_BLOCK
from worker.staging import HostArrays, Staging

MAX_PACKED = 32
"""Whole prompts that one prefill step may compute side by side in a fixed shape."""


class PrefillInputs:
    """A flat run of tokens, segment after segment. What only a single sequence has is written for the first segment.

    `block_table` [max_blocks], `context_len` [1] (with this chunk) and `last` [1] (its last token) serve the prefill of
    one sequence in a fixed shape; `offsets` [MAX_PACKED + 2] (where each prompt begins, padding being one more) and
    `lasts` [MAX_PACKED] (the last token of each) that of several. Padding tokens are token 0 at position 0 in the
    padding block.
    """

    def __init__(self, *, max_tokens: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        token, one = ((max_tokens,), torch.int64), ((1,), torch.int64)
        spec = {"token_ids": token, "positions": token, "slots": token, "context_len": one, "last": one}
        packed = {"offsets": ((MAX_PACKED + 2,), torch.int32), "lasts": ((MAX_PACKED,), torch.int64)}
        self.staging = Staging(spec | packed | {"block_table": ((max_blocks,), torch.int32)}, device)
        self.make_inert()

    def make_inert(self) -> None:
        """Make every token a padding token: a step over them touches nothing that is a sequence's."""
        host = self.staging.writable()
        for name, array in host.items():
            array[...] = 1 if name == "context_len" else 0
        self.staging.upload()

    def fill(self, batch: Batch, bucket: int) -> None:
        """Write the tokens of `batch`, pad up to `bucket` tokens, and upload."""
        host, first = self.staging.writable(), 0
        for segment in batch.segments:
            span = slice(first, first + segment.count)
            positions = np.arange(segment.start, segment.end)
            table = np.asarray(segment.sequence.block_table)
            host["token_ids"][span] = segment.sequence.token_ids[segment.start : segment.end]
            host["positions"][span] = positions
            host["slots"][span] = table[positions // self.block_size] * self.block_size + positions % self.block_size
            first += segment.count
        for name in ("token_ids", "positions", "slots"):
            host[name][first:bucket] = 0
        only = batch.segments[0]
        host["context_len"][0], host["last"][0] = only.end, only.count - 1
        host["block_table"][: len(only.sequence.block_table)] = only.sequence.block_table
        host["block_table"][len(only.sequence.block_table) :] = PADDING_BLOCK
        if len(batch.segments) <= MAX_PACKED:
            write_packing(host, [segment.count for segment in batch.segments], bucket)
        self.staging.upload()


def write_packing(host: HostArrays, counts: Sequence[int], bucket: int) -> None:
    """Where prompts of so many tokens lie in a run that is padded to `bucket`; places without a prompt look at token 0."""
    ends = np.cumsum(counts)
    host["offsets"][0] = 0
    host["offsets"][1 : len(counts) + 1] = ends
    host["offsets"][len(counts) + 1 :] = bucket
    host["lasts"][: len(counts)] = ends - 1
    host["lasts"][len(counts) :] = 0
