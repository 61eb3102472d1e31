"""The merge of an attention's partial results by the kernel that reads them."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1e30)


@triton.jit
def split_chunk(
    length: tl.tensor,
    SPLITS: tl.constexpr,
    LATE_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
) -> tl.tensor:
    """Tokens that one program takes of a row with `length` tokens before its new one. See early_plan.EarlyPlan."""
    short = tl.maximum(tl.cdiv(length, LATE_SPLITS), 1)
    long = tl.maximum(tl.cdiv(length, SPLITS), LONG_CHUNK)
    return tl.cdiv(tl.where(length <= LATE_SPLITS * LONG_CHUNK, short, long), MIN_CHUNK) * MIN_CHUNK


@triton.jit
def num_partials(
    length: tl.tensor,
    SPLITS: tl.constexpr,
    LATE_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
) -> tl.tensor:
    """Partial results that a row's programs leave: of more than LATE_SPLITS the last program makes one."""
    count = tl.maximum(tl.cdiv(length, split_chunk(length, SPLITS, LATE_SPLITS, MIN_CHUNK, LONG_CHUNK)), 1)
    return tl.where(count > LATE_SPLITS, 1, count)


@triton.jit
def merge_heads(
    sums: tl.tensor,
    stats: tl.tensor,
    part: tl.tensor,
    head: tl.tensor,
    count: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LATE_SPLITS: tl.constexpr,
) -> tl.tensor:
    """[1, CHUNK] float32: heads from `head` on side by side, merged over `count` partial results from place `part`."""
    HEADS: tl.constexpr = CHUNK // HEAD_DIM
    heads = head + tl.arange(0, HEADS)
    inside = heads < NUM_HEADS
    dims = tl.arange(0, HEAD_DIM)[None, :]
    highest = tl.full((HEADS,), _LOWEST, tl.float32)
    for split in tl.static_range(LATE_SPLITS):
        place = part + split * NUM_HEADS + heads
        highest = tl.maximum(highest, tl.load(stats + place, mask=inside & (split < count), other=_LOWEST))
    total = tl.zeros((HEADS,), tl.float32)
    merged = tl.zeros((HEADS, HEAD_DIM), tl.float32)
    for split in tl.static_range(LATE_SPLITS):
        place = part + split * NUM_HEADS + heads
        live = inside & (split < count)
        share = tl.exp2(tl.load(stats + place, mask=live, other=_LOWEST) - highest)
        share = tl.where(live, share, 0.0)
        result = tl.load(sums + place[:, None] * HEAD_DIM + dims, mask=live[:, None], other=0.0)
        merged += result.to(tl.float32) * share[:, None]
        total += share
    return tl.reshape(merged / tl.where(inside, total, 1.0)[:, None], (1, CHUNK))
