"""Causal attention of one sequence's new tokens, over the paged pool or over the tokens of this step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.attention_tiles import MIN_DOT, fold_tile
from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options, num_sms, power_of_two

_MAX_QUERIES = 128
_TILE_ELEMENTS = 8192
"""Numbers of one tile of keys in half precision."""
_NO_WINDOW = 2**30
_MIN_SPLIT = 512
"""Keys of a tier from which a second program for a query pays."""
_PROGRAMS_AN_SM = 2
_MERGED_ROWS = 16
_LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKeys:
    """Where the keys and values of one sequence lie in one layer's pool, those of this step among them."""

    keys: torch.Tensor
    values: torch.Tensor
    """[num_blocks, block_size, kv_heads, head_dim], contiguous."""
    block_table: torch.Tensor
    """[width] int32."""
    positions: torch.Tensor
    """[tokens] int64; padding tokens stand at 0 and see only the first key."""


@triton.jit
def _attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_table: tl.tensor,
    position: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    ALL_SEEN: tl.constexpr,
) -> tl.tensor:
    """Online softmax over keys [start, stop), of which a query sees those up to its own position."""
    dims = tl.arange(0, HEAD_PAD)
    for tile in tl.range(start, stop, TILE, num_stages=STAGES):
        index = tile + tl.arange(0, TILE)
        known = index < stop
        row = index.to(tl.int64)
        if PAGED:
            block = tl.load(block_table + index // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            row = block * BLOCK_SIZE + index % BLOCK_SIZE
        inside = known[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + row[:, None] * k_row + dims[None, :], mask=inside, other=0.0)
        value = tl.load(values + row[:, None] * v_row + dims[None, :], mask=inside, other=0.0)
        seen = known[None, :]
        if not ALL_SEEN:
            seen &= (index[None, :] <= position[:, None]) & (index[None, :] > position[:, None] - window)
        highest, total, acc = fold_tile(queries, key, value, seen, scale, highest, total, acc)
    return highest, total, acc


@triton.jit(do_not_specialize=["num_tokens", "window", "num_splits"])
def _prefill_attention(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_table: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    num_tokens: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = QUERIES // PACKED
    member = tl.arange(0, QUERIES)
    kv_head = tl.program_id(0) * PACKED // GROUP
    head = tl.program_id(0) * PACKED + member % PACKED
    # Programs with the most keys first.
    token = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS + member // PACKED
    dims = tl.arange(0, HEAD_PAD)
    is_live = (token < num_tokens) & (member < TOKENS * PACKED)
    live = is_live[:, None] & (dims < HEAD_DIM)[None, :]
    if PDL:
        wait_for_previous()
    position = tl.minimum(token, num_tokens - 1)
    if PAGED:
        position = tl.load(positions + position).to(tl.int32)
    place = q + token[:, None].to(tl.int64) * q_row + head[:, None] * q_head + dims[None, :]
    queries = tl.load(place, mask=live, other=0.0)
    stop = tl.max(position, axis=0) + 1
    start = tl.maximum(tl.min(position, axis=0) + 1 - window, 0) // TILE * TILE
    split = tl.program_id(2)
    if SPLITS:
        chunk = tl.cdiv(tl.cdiv(stop - start, num_splits), TILE) * TILE
        start += split * chunk
        stop = tl.minimum(start + chunk, stop)
    highest = tl.full((QUERIES,), _LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_PAD), tl.float32)
    keys += kv_head * k_head
    values += kv_head * v_head
    # Every query sees the keys before the first query's own, unless a window hides them.
    seen_by_all = tl.where(window > stop, (tl.min(position, axis=0) + 1) // TILE * TILE, start)
    middle = tl.maximum(tl.minimum(seen_by_all, stop), start)
    highest, total, acc = _attend(
        queries, keys, values, block_table, position, start, middle, window, scale, k_row, v_row, highest, total, acc,
        HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, STAGES, PAGED, True,
    )  # fmt: skip
    highest, total, acc = _attend(
        queries, keys, values, block_table, position, middle, stop, window, scale, k_row, v_row, highest, total, acc,
        HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, STAGES, PAGED, False,
    )  # fmt: skip
    # A part in which a query sees no key weighs nothing.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = token.to(tl.int64) * NUM_HEADS + head
    if SPLITS:
        row += split * num_tokens.to(tl.int64) * NUM_HEADS
        weight = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), _LOWEST)
        tl.store(stats + row, weight, mask=is_live)
    tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_splits(
    sums: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)[None, :]
    live = row < num_rows
    inside = live[:, None] & (dims < HEAD_DIM)
    if PDL:
        wait_for_previous()
    highest = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    for split in tl.range(0, num_splits, num_stages=1, loop_unroll_factor=4):
        place = split * num_rows.to(tl.int64) + row
        weight = tl.load(stats + place, mask=live, other=_LOWEST)
        part = tl.load(sums + place[:, None] * HEAD_DIM + dims, mask=inside, other=0.0)
        higher = tl.maximum(highest, weight)
        fade, share = tl.exp2(highest - higher), tl.exp2(weight - higher)
        total = total * fade + share
        acc = acc * fade[:, None] + part * share[:, None]
        highest = higher
    tl.store(out + row[:, None] * HEAD_DIM + dims, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    paged: PagedKeys | None = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], strided -> [tokens, heads, head_dim].

    With `paged`, keys and values are read from the pool and positions count; else token i sees tokens 0 .. i. `scale`
    defaults to 1 / sqrt(head_dim); `sliding_window` counts the keys a query sees, itself among them. `num_splits` programs
    share the keys of a query, by default as many as fill the GPU.
    """
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    head_pad = max(power_of_two(head_dim), MIN_DOT)
    keys, values, block_size, width = k, v, 1, num_tokens
    if paged is not None:
        assert paged.keys.is_contiguous()
        assert paged.values.is_contiguous()
        block_size = paged.keys.shape[1]
        width = len(paged.block_table) * block_size
        keys, values = paged.keys.flatten(0, 1), paged.values.flatten(0, 1)
    most = _MAX_QUERIES if head_pad <= _MAX_QUERIES else _MAX_QUERIES // 2
    packed = group if num_tokens * group <= most else 1
    queries = min(max(power_of_two(num_tokens * packed), MIN_DOT), most)
    blocks = (num_heads // packed, triton.cdiv(num_tokens, queries // packed))
    num_splits = num_splits or _splits(blocks[0] * blocks[1], width, num_sms(q.device))
    out = q.new_empty(num_tokens, num_heads, head_dim)
    sums, stats = out, out
    if num_splits > 1:
        sums = q.new_empty(num_splits, *out.shape, dtype=torch.float32)
        stats = q.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    options = launch_options(q.device)
    _prefill_attention[(*blocks, num_splits)](
        q,
        keys,
        values,
        q if paged is None else paged.block_table,
        q if paged is None else paged.positions,
        sums,
        stats,
        *(stride for tensor in (q, keys, values) for stride in tensor.stride()[:2]),
        num_tokens,
        sliding_window or _NO_WINDOW,
        num_splits,
        (scale or head_dim**-0.5) * math.log2(math.e),
        GROUP=group,
        PACKED=packed,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        TILE=min(max(_TILE_ELEMENTS * 2 // (head_pad * q.element_size()), 16), 128),
        STAGES=2,
        PAGED=paged is not None,
        SPLITS=num_splits > 1,
        num_warps=8 if queries * head_pad >= _TILE_ELEMENTS else 4,
        num_stages=2,
        **options,
    )
    if num_splits > 1:
        num_rows = num_tokens * num_heads
        _merge_splits[(triton.cdiv(num_rows, _MERGED_ROWS),)](
            sums, stats, out, num_rows, num_splits, HEAD_DIM=head_dim, HEAD_PAD=head_pad, ROWS=_MERGED_ROWS,
            num_warps=4, **options,
        )  # fmt: skip
    return out


def _splits(programs: int, width: int, num_sms: int) -> int:
    """Programs that share the keys of a query, where there are too few queries to keep a GPU busy."""
    return max(min(_PROGRAMS_AN_SM * num_sms // programs, width // _MIN_SPLIT), 1)
