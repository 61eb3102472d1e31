"""The static inputs of decode steps, and the state that a step hands to the next without the host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from worker.batch import Batch, Segment
from worker.block_pool import PADDING_BLOCK
from worker.inputs import MAX_PACKED
from worker.scatter import Scatter
from worker.sequence import Sequence
from worker.staging import HostArrays, Staging

FROM_HOST = -1
"""In `sources`: the token is in `token_ids`, not on the device."""
ROW_PADDING = {"token_ids": 0, "positions": 0, "live": 0, "sources": FROM_HOST}
"""An inert decode row: one token of context, in the padding block, that never moves on."""


@dataclass(frozen=True, slots=True)
class DecodeViews:
    """What one decode step reads and writes, cut to its shape. All but `block_tables` are [rows] int64."""

    token_ids: torch.Tensor
    """The row's last token, where the host knew it."""
    sources: torch.Tensor
    """Place of the row's last token in `last_tokens`, or FROM_HOST."""
    positions: torch.Tensor
    """Of the token that the step computes; a step moves live rows on by one."""
    live: torch.Tensor
    """1 for rows of sequences, 0 for padding."""
    block_tables: torch.Tensor
    """[rows, width] int32."""
    last_tokens: torch.Tensor
    """Chosen by the last step, row by row; the places after all rows are for the tokens of a prefill."""
    rows: torch.Tensor
    """0, 1, 2, ..."""
    logits: torch.Tensor | None = None
    """[rows, vocab] float32: where the step should leave its logits; None = in memory of its own. A step that leaves
    them elsewhere is right too, at the price of a copy."""

    def logits_buffer(self, vocab_size: int) -> torch.Tensor:
        """Memory for the step's logits, [rows, vocab] float32."""
        if self.logits is not None:
            return self.logits
        return torch.empty(len(self.positions), vocab_size, dtype=torch.float32, device=self.positions.device)


class DecodeInputs:
    """One row a sequence, in buffers that never move.

    A step leaves behind what the next one starts from: its tokens in `last_tokens`, positions moved on, and each row
    its own source. So a step over the same rows as the one before needs nothing from the host, and one over other rows
    only where each sequence's token lies.
    """

    def __init__(self, *, max_batch: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_batch = max_batch
        row = ((max_batch,), torch.int64)
        tables = ((max_batch, max_blocks), torch.int32)
        self.staging = Staging(dict.fromkeys(ROW_PADDING, row) | {"block_tables": tables}, device)
        self._new_blocks = Scatter(self.staging, "block_tables", capacity=max_batch)
        self.last_tokens = torch.zeros(max_batch + MAX_PACKED, dtype=torch.int64, device=device)
        self.rows = torch.arange(max_batch, device=device)
        self.num_uploads = 0
        self._rows_of: dict[Sequence, int] = {}
        """Where the step before left each sequence's token."""
        self._last: tuple[Sequence, ...] = ()
        self._num_blocks: list[int] = []
        self._bucket = 0
        self.make_inert()

    def make_inert(self) -> None:
        """Make every row a padding row: a step over them touches nothing that is a sequence's."""
        pad_rows(self.staging.writable(), slice(None))
        self.staging.upload()
        self.forget()

    def forget(self) -> None:
        """Nothing on the device counts any more: the next step gets everything from the host."""
        self._rows_of, self._last, self._num_blocks, self._bucket = {}, (), [], 0

    def note_prefill(self, sequences: Items[Sequence], tokens: torch.Tensor) -> None:
        """A prefill step has chosen the sequences' next tokens: `tokens` [at least as many] int64, on the device."""
        count = len(sequences)
        self.last_tokens[self.max_batch : self.max_batch + count].copy_(tokens[:count])
        self.forget()
        self._rows_of = {sequence: self.max_batch + place for place, sequence in enumerate(sequences)}

    def fill(self, batch: Batch, bucket: int) -> None:
        """Make the rows up to `bucket` those of `batch`; uploads nothing when the device has moved there by itself.

        A sequence with a token in flight must have been in the step before.
        """
        sequences = tuple(segment.sequence for segment in batch.segments)
        num_blocks = [len(sequence.block_table) for sequence in sequences]
        is_as_left = (
            bucket == self._bucket and sequences == self._last and all(sequence.num_in_flight for sequence in sequences)
        )
        if not is_as_left:
            self._write(batch.segments, bucket)
            self.staging.upload()
            self.num_uploads += 1
        elif num_blocks != self._num_blocks:
            self._extend_tables(sequences, num_blocks)
            self.num_uploads += 1
        self._rows_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._last, self._num_blocks, self._bucket = sequences, num_blocks, bucket

    def views(self, bucket: int, width: int) -> DecodeViews:
        """The first `bucket` rows, with block tables of `width` blocks."""
        device = self.staging.device
        return DecodeViews(
            token_ids=device["token_ids"][:bucket],
            sources=device["sources"][:bucket],
            positions=device["positions"][:bucket],
            live=device["live"][:bucket],
            block_tables=device["block_tables"][:bucket, :width],
            last_tokens=self.last_tokens,
            rows=self.rows[:bucket],
        )

    def _write(self, segments: tuple[Segment, ...], bucket: int) -> None:
        host, count = self.staging.writable(), len(segments)
        in_flight = [segment.sequence.num_in_flight > 0 for segment in segments]
        host["positions"][:count] = [segment.start for segment in segments]
        host["live"][:count] = 1
        host["sources"][:count] = [
            self._rows_of[segment.sequence] if is_flying else FROM_HOST
            for segment, is_flying in zip(segments, in_flight, strict=True)
        ]
        host["token_ids"][:count] = [
            0 if is_flying else segment.sequence.token_ids[segment.start]
            for segment, is_flying in zip(segments, in_flight, strict=True)
        ]
        self._write_tables(host, [segment.sequence.block_table for segment in segments])
        pad_rows(host, slice(count, bucket))

    def _extend_tables(self, sequences: tuple[Sequence, ...], num_blocks: list[int]) -> None:
        """Add the blocks that rows got since the last step, and nothing else: the rest has moved on on the device."""
        width = self.staging.device["block_tables"].shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for row, (old, new) in enumerate(zip(self._num_blocks, num_blocks, strict=True)):
            if new != old:
                places += range(row * width + old, row * width + new)
                blocks += sequences[row].block_table[old:new]
        self._new_blocks.write(places, blocks)

    @staticmethod
    def _write_tables(host: HostArrays, tables: list[list[int]]) -> None:
        block_tables = host["block_tables"]
        block_tables[: len(tables)] = PADDING_BLOCK
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table


def pad_rows(host: HostArrays, rows: slice) -> None:
    """Make decode rows inert."""
    for name, value in ROW_PADDING.items():
        host[name][rows] = value
    host["block_tables"][rows] = PADDING_BLOCK
