"""Random but valid inputs for a self-check, with history in the KV pool, and padding that is inert or poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from worker.block_pool import PADDING_BLOCK
from worker.decode_inputs import FROM_HOST, DecodeInputs, pad_rows
from worker.graphs.key import GraphKey
from worker.inputs import MAX_PACKED, PrefillInputs, write_packing
from worker.kv_cache import KVCache

Inputs = TypeVar("Inputs", bound=DecodeInputs | PrefillInputs)

CHECKED_ROWS = 32
"""Decode rows that have a scratch block of their own, at least."""
HISTORY_BLOCKS = 8
"""The last scratch blocks are only read: a row that read what another writes in the same step would have two outcomes."""


class _Draw(Generic[Inputs]):
    """Fills `inputs` for one key. Has `scratch_blocks` to itself while it is in use."""

    def __init__(
        self, inputs: Inputs, kv_cache: KVCache, scratch_blocks: Sequence[int], key: GraphKey, vocab_size: int
    ) -> None:
        self.inputs = inputs
        self.kv_cache = kv_cache
        self.scratch_blocks = scratch_blocks
        self.key = key
        self.vocab_size = vocab_size


class DecodeDraw(_Draw[DecodeInputs]):
    """Rows of any length the tier allows, each with a last block of its own; rows without one are padding."""

    def __call__(self, generator: torch.Generator, poison: bool) -> int:
        """See worker.graphs.region.DrawInputs."""
        valid = min(self.key.bucket // 2 + 1, len(self.scratch_blocks) - HISTORY_BLOCKS)
        fill_history(self.kv_cache, self.scratch_blocks, generator, poison=poison)
        host = self.inputs.staging.writable()
        for row in range(valid):
            self._draw_row(row, generator)
        pad_rows(host, slice(valid, self.key.bucket))
        if poison:
            host["token_ids"][valid : self.key.bucket] = self.vocab_size - 1
        self.inputs.staging.upload()
        last = torch.randint(self.vocab_size, self.inputs.last_tokens.shape, generator=generator)
        self.inputs.last_tokens.copy_(last)
        return valid

    def _draw_row(self, row: int, generator: torch.Generator) -> None:
        host, size = self.inputs.staging.writable(), self.inputs.block_size
        own, offset = self.scratch_blocks[row], _below(size, generator)
        full_blocks = _below(max((self.key.tier - 1 - offset) // size, 0) + 1, generator)
        position = min(full_blocks * size + offset, self.key.tier - 1)
        others = _history(self.scratch_blocks, full_blocks, generator)
        host["token_ids"][row] = _below(self.vocab_size, generator)
        host["positions"][row] = position
        host["live"][row] = 1
        host["sources"][row] = row if row % 2 else FROM_HOST
        host["block_tables"][row, :full_blocks] = others
        host["block_tables"][row, full_blocks] = own
        host["block_tables"][row, full_blocks + 1 :] = PADDING_BLOCK


class PrefillDraw(_Draw[PrefillInputs]):
    """One sequence: a chunk that fills about three quarters of the bucket, after as much history as its variant has."""

    def __call__(self, generator: torch.Generator, poison: bool) -> int:
        """See worker.graphs.region.DrawInputs. The one row of the output is valid."""
        count, start = self._lengths(generator)
        fill_history(self.kv_cache, self.scratch_blocks, generator, poison=poison)
        host, size = self.inputs.staging.writable(), self.inputs.block_size
        history = _history(self.scratch_blocks, start // size, generator)
        table = torch.tensor([*history, *self.scratch_blocks[: -(-count // size)]], dtype=torch.int64)
        positions = torch.arange(start, start + count)
        self._write_tokens(positions, positions, table, generator, poison)
        host["context_len"][0], host["last"][0] = start + count, count - 1
        host["block_table"][...] = PADDING_BLOCK
        host["block_table"][: len(table)] = table.numpy()
        self.inputs.staging.upload()
        return 1

    def _write_tokens(
        self,
        positions: torch.Tensor,
        places: torch.Tensor,
        table: torch.Tensor,
        generator: torch.Generator,
        poison: bool,
    ) -> None:
        """Random tokens at `positions`, whose keys and values go to `places` in the blocks of `table`; then padding."""
        host, size, bucket = self.inputs.staging.writable(), self.inputs.block_size, self.key.bucket
        count = len(positions)
        host["token_ids"][:bucket] = self.vocab_size - 1 if poison else 0
        host["positions"][:bucket] = 0
        host["slots"][:bucket] = 0
        host["token_ids"][:count] = torch.randint(self.vocab_size, (count,), generator=generator).numpy()
        host["positions"][:count] = positions.numpy()
        host["slots"][:count] = (table[places // size] * size + places % size).numpy()

    def _lengths(self, generator: torch.Generator) -> tuple[int, int]:
        """(tokens of the chunk, tokens before it)."""
        count = max(3 * self.key.bucket // 4, 1)
        if self.key.tier == 0:
            return count, 0
        count = min(count, self.key.tier)
        return count, _below((self.key.tier - count) // self.inputs.block_size + 1, generator) * self.inputs.block_size


class PackedDraw(PrefillDraw):
    """Several prompts, in about three quarters of the bucket."""

    def __call__(self, generator: torch.Generator, poison: bool) -> int:
        """See worker.graphs.region.DrawInputs. The rows of the prompts are valid."""
        fill_history(self.kv_cache, self.scratch_blocks, generator, poison=poison)
        counts = self._counts(generator)
        positions = torch.cat([torch.arange(one) for one in counts])
        # Prompts may share blocks here: keys and values go to places in the order of the run.
        places = torch.arange(len(positions))
        table = torch.tensor(self.scratch_blocks[: -(-len(positions) // self.inputs.block_size)], dtype=torch.int64)
        self._write_tokens(positions, places, table, generator, poison)
        write_packing(self.inputs.staging.writable(), counts, self.key.bucket)
        self.inputs.staging.upload()
        return len(counts)

    def _counts(self, generator: torch.Generator) -> list[int]:
        """Tokens of each prompt: at least one, together about three quarters of the bucket."""
        left = max(3 * self.key.bucket // 4, 1)
        counts: list[int] = []
        while left and len(counts) < MAX_PACKED:
            counts.append(min(1 + _below(max(self.key.bucket // 4, 1), generator), left))
            left -= counts[-1]
        return counts


def fill_history(kv_cache: KVCache, blocks: Sequence[int], generator: torch.Generator, *, poison: bool) -> None:
    """Random keys and values in `blocks`, from the generator alone; zeros, or NaN, in the padding block."""
    seed = _below(2**31, generator)
    on_device = torch.Generator(kv_cache.storage.device).manual_seed(seed)
    shape = (*kv_cache.storage.shape[:2], len(blocks), *kv_cache.storage.shape[3:])
    index = torch.tensor(blocks, device=kv_cache.storage.device)
    history = torch.randn(shape, generator=on_device, device=kv_cache.storage.device, dtype=kv_cache.storage.dtype)
    kv_cache.storage.index_copy_(2, index, history)
    kv_cache.storage[:, :, PADDING_BLOCK] = torch.nan if poison else 0.0


def _history(scratch_blocks: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
    """`count` blocks that no row writes, in any order and again and again."""
    places = torch.randint(HISTORY_BLOCKS, (count,), generator=generator)
    return [scratch_blocks[-1 - place] for place in places.tolist()]


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))
