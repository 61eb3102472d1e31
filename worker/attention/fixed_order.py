"""Attention on the CPU in which a query's sum does not depend on its neighbours, on phase, or on how far tables reach.

Keys are taken in tiles of a fixed number of tokens, from position 0 on, and folded one after the other: what lies past a
query changes nothing, to the bit. Queries of one sequence share its tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.attention.pooled import PooledAttention, Scoring
from worker.attention.prefill import PrefillSegment
from worker.deterministic.exact import fixed_sum
from worker.deterministic.row_tiles import RowTiles
from worker.kv_cache import KVCache

KEY_TILE = 256
"""Tokens folded at a time."""
_LOWEST = -1e30
"""Below every score, and finite: what has seen no key yet is multiplied away without a NaN."""


class FoldedKeys:
    """The softmax of some queries over the keys so far, of which there is a tile at least before `result`."""

    highest: torch.Tensor
    """[batch, queries, 1]: the largest score."""
    total: torch.Tensor
    """[batch, queries, 1]: the sum of weights."""
    sums: torch.Tensor
    """[batch, queries, head_dim]: the weighted sum of values."""

    def __init__(self) -> None:
        self.is_empty = True

    def fold(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """scores [batch, queries, KEY_TILE], minus infinity where a query does not look; values [batch, KEY_TILE, head_dim].

        The scores are overwritten.
        """
        highest = scores.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST)
        if not self.is_empty:
            highest = torch.maximum(self.highest, highest)
        weights = scores.sub_(highest).exp_()
        total, sums = fixed_sum(weights), torch.bmm(weights, values.contiguous())
        if not self.is_empty:
            fade = (self.highest - highest).exp_()
            total, sums = self.total * fade + total, self.sums * fade + sums
        self.highest, self.total, self.sums, self.is_empty = highest, total, sums, False

    def result(self) -> torch.Tensor:
        """[batch, queries, head_dim]."""
        return self.sums / self.total


def key_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [batch, queries, head_dim], keys [batch, KEY_TILE, head_dim] -> [batch, queries, KEY_TILE]."""
    # One layout for all: which of its ways a library takes may depend on strides.
    return torch.bmm(queries.contiguous(), keys.contiguous().transpose(1, 2))


class FixedOrderDecode(PooledAttention):
    """One new token a row. See worker.attention.decode.PagedDecodeAttention for what it reads."""

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        query_rows: int,
    ) -> None:
        super().__init__(kv_cache, slots=slots)
        self.query_rows = query_rows
        """Rows that the queries of one key head are padded to."""
        self.context_lens = context_lens[:, None]
        self.tiles = [
            (places, table_slots(block_tables, places, kv_cache.block_size, self.context_lens))
            for places in tile_places(block_tables.shape[1] * kv_cache.block_size, slots.device)
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:  # noqa: ARG002 (one signature for all)
        """See PooledAttention."""
        rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        grouped = functional.pad(q.reshape(-1, group, head_dim), (0, 0, 0, self.query_rows - group))
        folded, scale = FoldedKeys(), scoring.scale or head_dim**-0.5
        for places, slots in self.tiles:
            is_dead = places >= self.context_lens
            keys = self._read(self.kv_cache.keys[layer], slots).flatten(0, 1)
            values = self._read(self.kv_cache.values[layer], slots).masked_fill(is_dead[:, None, :, None], 0)
            is_hidden = is_dead
            if scoring.sliding_window is not None:
                is_hidden = is_dead | (places < self.context_lens - scoring.sliding_window)
            scores = key_scores(grouped, keys).mul_(scale).view(rows, num_kv_heads, self.query_rows, -1)
            scores = scores.masked_fill_(is_hidden[:, None, None, :], -torch.inf).flatten(0, 1)
            folded.fold(scores, values.flatten(0, 1))
        return folded.result()[:, :group].reshape(rows, num_heads, head_dim)

    def _read(self, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[rows, KEY_TILE] slots -> [rows, kv_heads, KEY_TILE, head_dim]."""
        return blocks.flatten(0, 1)[slots].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of one sequence: [first, first + count) of a step."""

    first: int
    count: int
    positions: torch.Tensor
    """[count] int64."""
    context_len: torch.Tensor | int
    """Tokens of the sequence up to the end of the part."""
    last: int
    """No position is larger."""
    block_table: torch.Tensor | None
    """[blocks] int32; None for a part from position 0, whose keys all come with it."""


class FixedOrderPrefill(PooledAttention):
    """Parts of prompts side by side."""

    def __init__(
        self, kv_cache: KVCache, *, slots: torch.Tensor, parts: Sequence[PromptPart], query_tiles: RowTiles
    ) -> None:
        super().__init__(kv_cache, slots=slots)
        self.parts = parts
        self.query_tiles = query_tiles
        """Tokens whose queries are computed together."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See PooledAttention."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in self.parts:
            span = slice(part.first, part.first + part.count)
            out[span] = self._attend(layer, part, (q[span], k[span], v[span]), scoring)
        return out

    def _attend(
        self,
        layer: int,
        part: PromptPart,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: Scoring,
    ) -> torch.Tensor:
        q, k, v = qkv
        count, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        scale = scoring.scale or head_dim**-0.5
        cut = self.query_tiles.cut(count)
        padding = sum(cut) - count
        # Token by token, so that a tile of tokens is a tile of rows: [kv_heads, tokens * group, head_dim].
        queries = functional.pad(q, (0, 0, 0, 0, 0, padding)).view(-1, num_kv_heads, group, head_dim).transpose(0, 1)
        tiles = [tile.flatten(1, 2) for tile in queries.split(cut, dim=1)]
        positions = (
            functional.pad(part.positions, (0, padding)).repeat_interleave(group).split([n * group for n in cut])
        )
        folded = [FoldedKeys() for _ in tiles]
        for places in tile_places(part.last + 1, q.device):
            keys, values = self._read(layer, part, places, k, v)
            for tile, position, state in zip(tiles, positions, folded, strict=True):
                is_hidden = places > position[:, None]
                if scoring.sliding_window is not None:
                    is_hidden = is_hidden | (places <= position[:, None] - scoring.sliding_window)
                state.fold(key_scores(tile, keys).mul_(scale).masked_fill_(is_hidden, -torch.inf), values)
        out = torch.cat([state.result() for state in folded], dim=1)[:, : count * group]
        return out.view(num_kv_heads, count, group, head_dim).transpose(0, 1).reshape(count, num_heads, head_dim)

    def _read(
        self, layer: int, part: PromptPart, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A tile of keys and values, [kv_heads, KEY_TILE, head_dim] each, zero past the part."""
        if part.block_table is None:
            index = places.clamp(max=part.count - 1)
            keys, values = k[index], v[index]
        else:
            context = torch.as_tensor(part.context_len).view(1, 1)
            slots = table_slots(part.block_table[None], places, self.kv_cache.block_size, context)[0]
            keys, values = (pool[layer].flatten(0, 1)[slots] for pool in (self.kv_cache.keys, self.kv_cache.values))
        is_dead = places >= part.context_len
        return keys.transpose(0, 1), values.masked_fill(is_dead[:, None, None], 0).transpose(0, 1)


def segment_parts(segments: Sequence[PrefillSegment], device: torch.device) -> list[PromptPart]:
    """Of segments whose lengths the host knows."""
    return [
        PromptPart(
            first=segment.first,
            count=segment.count,
            positions=torch.arange(segment.start, segment.start + segment.count, device=device),
            context_len=segment.start + segment.count,
            last=segment.start + segment.count - 1,
            block_table=segment.block_table if segment.start else None,
        )
        for segment in segments
    ]


def tile_places(width: int, device: torch.device) -> list[torch.Tensor]:
    """Positions of the tiles that hold the first `width` tokens, [KEY_TILE] int64 each."""
    return [torch.arange(first, first + KEY_TILE, device=device) for first in range(0, width, KEY_TILE)]


def table_slots(
    block_tables: torch.Tensor, places: torch.Tensor, block_size: int, context_lens: torch.Tensor
) -> torch.Tensor:
    """block_tables [rows, width], places [n], context_lens [rows, 1] -> [rows, n] int64; dead places lie in slot 0."""
    columns = (places // block_size).clamp(max=block_tables.shape[1] - 1)
    slots = block_tables[:, columns].long() * block_size + places % block_size
    return slots.masked_fill(places >= context_lens, 0)
