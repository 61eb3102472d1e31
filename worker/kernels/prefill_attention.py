"""Causal attention of one sequence's new tokens, over the paged pool or over the tokens of this step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.decode_attention import fold_tile
from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options, power_of_two

_MIN_DOT = 16
_MAX_QUERIES = 128
_TILE_ELEMENTS = 8192
"""Numbers of one tile of keys in half precision."""
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


@triton.jit(do_not_specialize=["num_tokens", "window"])
def _prefill_attention(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_table: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    num_tokens: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    kv_head = head // GROUP
    # Programs with the most keys first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    token = first + tl.arange(0, QUERIES)
    dims = tl.arange(0, HEAD_PAD)
    live = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    if PDL:
        wait_for_previous()
    position = tl.minimum(token, num_tokens - 1)
    if PAGED:
        position = tl.load(positions + position).to(tl.int32)
    queries = tl.load(q + token[:, None].to(tl.int64) * q_row + head * q_head + dims[None, :], mask=live, other=0.0)
    stop = tl.max(position, axis=0) + 1
    start = tl.maximum(tl.min(position, axis=0) + 1 - window, 0) // TILE * TILE
    highest = tl.full((QUERIES,), _LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_PAD), tl.float32)
    for tile in tl.range(start, stop, TILE, num_stages=STAGES):
        index = tile + tl.arange(0, TILE)
        known = index < stop
        row = index.to(tl.int64)
        if PAGED:
            block = tl.load(block_table + index // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            row = block * BLOCK_SIZE + index % BLOCK_SIZE
        inside = known[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + row[:, None] * k_row + kv_head * k_head + dims[None, :], mask=inside, other=0.0)
        value = tl.load(values + row[:, None] * v_row + kv_head * v_head + dims[None, :], mask=inside, other=0.0)
        seen = (index[None, :] <= position[:, None]) & (index[None, :] > position[:, None] - window)
        highest, total, acc = fold_tile(queries, key, value, seen, scale, highest, total, acc)
    place = out + (token[:, None].to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    paged: PagedKeys | None = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], strided -> [tokens, heads, head_dim].

    With `paged`, keys and values are read from the pool and positions count; else token i sees tokens 0 .. i. `scale`
    defaults to 1 / sqrt(head_dim); `sliding_window` counts the keys a query sees, itself among them.
    """
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    num_tokens, num_heads, head_dim = q.shape
    head_pad = max(power_of_two(head_dim), _MIN_DOT)
    queries = min(max(power_of_two(num_tokens), _MIN_DOT), _MAX_QUERIES if head_pad <= _MAX_QUERIES else 64)
    keys, values, block_size = k, v, 1
    if paged is not None:
        assert paged.keys.is_contiguous()
        assert paged.values.is_contiguous()
        block_size = paged.keys.shape[1]
        keys, values = paged.keys.flatten(0, 1), paged.values.flatten(0, 1)
    out = q.new_empty(num_tokens, num_heads, head_dim)
    _prefill_attention[(num_heads, triton.cdiv(num_tokens, queries))](
        q,
        keys,
        values,
        q if paged is None else paged.block_table,
        q if paged is None else paged.positions,
        out,
        *(stride for tensor in (q, keys, values) for stride in tensor.stride()[:2]),
        num_tokens,
        sliding_window or 2**30,
        (scale or head_dim**-0.5) * math.log2(math.e),
        GROUP=num_heads // k.shape[1],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        TILE=min(max(_TILE_ELEMENTS * 2 // (head_pad * q.element_size()), 16), 128),
        STAGES=2,
        PAGED=paged is not None,
        num_warps=8 if queries * head_pad >= _TILE_ELEMENTS else 4,
        num_stages=2,
        **launch_options(q.device),
    )
    return out
