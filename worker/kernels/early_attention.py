"""Decode attention for few rows, between kernels that start early.

Positions, block tables, rotary angles and cached tokens are read before the wait. That is sound where the first kernel of
a step triggers only after its own wait (`token_rows.embed_tokens` does): then no kernel of a step starts before the step
before has ended, and those are what earlier steps have left.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from worker.kernels.attention_tiles import (
    MIN_DOT,
    attend_chunk,
    begin_with_new,
    cached_tokens,
    fold_tile,
    load_head,
)
from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two
from worker.kernels.late_merge import split_chunk
from worker.kernels.partials import Partials
from worker.kernels.qkv_layout import QkvLayout

_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _merge_all(
    sums: tl.tensor,
    stats: tl.tensor,
    part: tl.tensor,
    count: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """`count` partial results of one KV head's queries, from place `part` on, become the first of them."""
    member, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_DIM)[None, :]
    inside = member < GROUP
    highest = tl.full((GROUP_PAD,), _LOWEST, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_DIM), tl.float32)
    for split in tl.range(0, count, num_stages=1, loop_unroll_factor=4):
        place = part + split * NUM_HEADS + member
        # Past the first cache, which may hold what was there before the other programs wrote.
        weight = tl.load(stats + place, mask=inside, other=_LOWEST, cache_modifier=".cg")
        result = tl.load(sums + place[:, None] * HEAD_DIM + dims, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, weight)
        fade, share = tl.exp2(highest - higher), tl.exp2(weight - higher)
        total = total * fade + share
        acc = acc * fade[:, None] + result.to(tl.float32) * share[:, None]
        highest = higher
    # Every thread has read before one of them overwrites.
    tl.debug_barrier()
    place = part + member
    done = (acc / total[:, None]).to(sums.dtype.element_ty)
    tl.store(sums + place[:, None] * HEAD_DIM + dims, done, mask=inside[:, None])
    tl.store(stats + place, highest + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["table_width"])
def _early_attention(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    rope_table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    positions: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    arrived: tl.tensor,
    table_width: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    LATE_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    MORE_TILES: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    dtype: tl.constexpr = keys.dtype.element_ty
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    chunk = split_chunk(position, SPLITS, LATE_SPLITS, MIN_CHUNK, LONG_CHUNK)
    num_live = tl.maximum(tl.cdiv(position, chunk), 1)
    if split < num_live:
        table = block_tables + row * table_width
        start = split * chunk
        stop = tl.minimum(start + chunk, position)
        dims = tl.arange(0, HEAD_PAD)
        token = start + tl.arange(0, TILE)
        live = token < stop
        old_key, old_value = cached_tokens(
            keys, values, table, kv_head, token, live, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE
        )
        slot = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        if PDL:
            wait_for_previous()
        member = tl.arange(0, DOT_ROWS)
        group = (member < GROUP)[:, None]
        base = qkv + row * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        queries = load_head(
            base + (kv_head * GROUP + member)[:, None] * HEAD_DIM,
            q_norm, rope_table, position, group, eps, HEAD_DIM, HEAD_PAD, True, NORMS,
        ).to(dtype)  # fmt: skip
        owns_new = split == 0
        one = tl.arange(0, 1)[:, None]
        key = load_head(
            base + (NUM_HEADS + kv_head) * HEAD_DIM + one,
            k_norm, rope_table, position, owns_new, eps, HEAD_DIM, HEAD_PAD, True, NORMS,
        ).to(dtype)  # fmt: skip
        inside = owns_new & (dims < HEAD_DIM)[None, :]
        new_value = base + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + one + dims[None, :]
        value = tl.load(new_value, mask=inside, other=0.0).to(dtype)
        written = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        tl.store(keys + written, key, mask=inside)
        tl.store(values + written, value, mask=inside)
        highest, total, acc = begin_with_new(queries, key, value, owns_new, scale, DOT_ROWS, HEAD_PAD)
        highest, total, acc = fold_tile(queries, old_key, old_value, live[None, :], scale, highest, total, acc)
        if MORE_TILES:
            highest, total, acc = attend_chunk(
                queries, keys, values, table, kv_head, start + TILE, stop, scale, highest, total, acc,
                NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, 2,
            )  # fmt: skip
        part = row * SPLITS * NUM_HEADS + kv_head * GROUP
        out = part + split * NUM_HEADS + member
        stored = group & (dims < HEAD_DIM)[None, :]
        done = (acc / total[:, None]).to(sums.dtype.element_ty)
        tl.store(sums + out[:, None] * HEAD_DIM + dims[None, :], done, mask=stored)
        tl.store(stats + out, highest + tl.log2(total), mask=member < GROUP)
        if num_live > LATE_SPLITS:
            # All threads have stored before one of them announces it.
            tl.debug_barrier()
            counter = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_live - 1:
                tl.debug_barrier()
                _merge_all(sums, stats, part, num_live, NUM_HEADS, GROUP, GROUP_PAD, HEAD_DIM)
                tl.store(counter, 0)


def early_attention(
    qkv: torch.Tensor,
    layout: QkvLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    partials: Partials,
    arrived: torch.Tensor,
) -> None:
    """Store the new keys and values, attend, and leave the results in `partials`.

    qkv [rows, heads * head_dim] float32, contiguous, as `layout` says; keys and values are one layer's pool
    [num_blocks, block_size, kv_heads, head_dim]; block_tables [rows, width] int32, its rows maybe further apart than
    `width`; `arrived` [at least rows * kv_heads] int32, zero between launches.
    """
    assert qkv.is_contiguous()
    assert keys.is_contiguous()
    num_heads, num_kv_heads, head_dim, plan = layout.num_heads, layout.num_kv_heads, layout.head_dim, partials.plan
    norms = None if layout.q_norm is None else (layout.q_norm, layout.k_norm)
    group_pad = power_of_two(num_heads // num_kv_heads)
    _early_attention[(num_kv_heads * plan.num_splits, len(qkv))](
        qkv,
        *(norms or (qkv, qkv)),
        layout.rope_table,
        keys,
        values,
        block_tables,
        partials.positions,
        partials.sums,
        partials.stats,
        arrived,
        block_tables.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        layout.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_PAD=group_pad,
        DOT_ROWS=max(group_pad, MIN_DOT),
        HEAD_DIM=head_dim,
        HEAD_PAD=max(head_dim, MIN_DOT),
        BLOCK_SIZE=keys.shape[1],
        SPLITS=plan.num_splits,
        LATE_SPLITS=plan.late_splits,
        MIN_CHUNK=plan.min_chunk,
        LONG_CHUNK=plan.long_chunk,
        TILE=plan.tile,
        MORE_TILES=block_tables.shape[1] * keys.shape[1] > plan.tile,
        NORMS=norms is not None,
        num_warps=plan.num_warps,
        num_stages=2,
        **launch_options(qkv.device),
    )
