"""Decode attention over the paged pool: one new token a row, its keys divided among programs, merged by the last.

The program that owns the first share also norms and turns the new key, stores it and the new value in the pool, and adds
them from registers: nothing that this step writes is read back, and a row of length 1 reads nothing from the pool.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from worker.kernels.attention_tiles import MIN_DOT, attend_chunk, begin_with_new, load_head
from worker.kernels.decode_workspace import DecodeWorkspace
from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options, num_sms, power_of_two
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.split_plan import SplitPlan, split_plan

_MERGED_ELEMENTS = 8192
"""Partial results that the merge holds at once, in numbers."""


@triton.jit
def _merge(
    sums: tl.tensor,
    stats: tl.tensor,
    first: tl.tensor,
    num_live: tl.tensor,
    out: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MERGED: tl.constexpr,
) -> None:
    """Partial results `first` .. `first + num_live` of one row and KV head -> `out`, at its first query head."""
    member, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    inside = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    for split in range(0, num_live, MERGED):
        index = split + tl.arange(0, MERGED)
        live = (index < num_live)[:, None] & (member < GROUP)[None, :]
        place = (first + index[:, None]) * GROUP + member[None, :]
        # Past the first cache, which may hold what was there before the other programs wrote.
        high = tl.load(stats + 2 * place, mask=live, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(stats + 2 * place + 1, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + place[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(high, axis=0))
        share = tl.exp2(high - higher[None, :])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight * share, axis=0)
        acc = acc * fade[:, None] + tl.sum(part * share[:, :, None], axis=0)
        highest = higher
    place = member[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits", "min_chunk", "window", "table_width"])
def _decode_attention(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    rope_table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    arrived: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    table_width: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED: tl.constexpr,
    TURNS: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        wait_for_previous()
    position = tl.load(positions + row).to(tl.int32)
    table = block_tables + row * table_width
    first = tl.maximum(position + 1 - window, 0)
    chunk = tl.cdiv(tl.maximum(tl.cdiv(position - first, num_splits), min_chunk), TILE) * TILE
    num_live = tl.maximum(tl.cdiv(position - first, chunk), 1)
    if split < num_live:
        member, dims = tl.arange(0, DOT_ROWS), tl.arange(0, HEAD_PAD)
        group = (member < GROUP)[:, None]
        queries = load_head(
            q + row * q_row + (kv_head * GROUP + member)[:, None] * q_head,
            q_norm, rope_table, position, group, eps, HEAD_DIM, HEAD_PAD, TURNS, NORMS,
        )  # fmt: skip
        owns_new = split == 0
        one = tl.arange(0, 1)[:, None]
        key = load_head(
            k + row * k_row + kv_head * k_head + one,
            k_norm, rope_table, position, owns_new, eps, HEAD_DIM, HEAD_PAD, TURNS, NORMS,
        )  # fmt: skip
        inside = owns_new & (dims < HEAD_DIM)[None, :]
        value = tl.load(v + row * v_row + kv_head * v_head + one + dims[None, :], mask=inside, other=0.0)
        slot = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        cached = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        tl.store(keys + cached, key, mask=inside)
        tl.store(values + cached, value, mask=inside)

        highest, total, acc = begin_with_new(queries, key, value, owns_new, scale, DOT_ROWS, HEAD_PAD)
        start = first + split * chunk
        highest, total, acc = attend_chunk(
            queries, keys, values, table, kv_head, start,
            tl.minimum(start + chunk, position), scale, highest, total, acc,
            NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, STAGES,
        )  # fmt: skip

        out_head = out + (row * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM
        stored = group & (dims < HEAD_DIM)[None, :]
        if num_live == 1:
            done = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out_head + member[:, None] * HEAD_DIM + dims[None, :], done, mask=stored)
        else:
            partial = (row * NUM_KV_HEADS + kv_head) * num_splits
            place = (partial + split) * GROUP + member
            tl.store(stats + 2 * place, highest, mask=member < GROUP)
            tl.store(stats + 2 * place + 1, total, mask=member < GROUP)
            tl.store(sums + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)
            # All threads have stored before one of them announces it.
            tl.debug_barrier()
            counter = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_live - 1:
                tl.debug_barrier()
                _merge(sums, stats, partial, num_live, out_head, GROUP, GROUP_PAD, HEAD_DIM, HEAD_PAD, MERGED)
                tl.store(counter, 0)


def decode_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    layout: QkvLayout | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    plan: SplitPlan | None = None,
) -> torch.Tensor:
    """Store the new keys and values and attend -> [rows, heads, head_dim]. The inputs are left as they are.

    q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], strided; keys and values are one layer's pool
    [num_blocks, block_size, kv_heads, head_dim], contiguous. block_tables [rows, width] int32, its rows maybe further apart
    than `width`; positions [rows] int64 of the new tokens, whose slots the tables hold. Padding rows stand at position 0 in
    the padding block. With `layout`, q and k are normed and turned first as it says. `scale` defaults to
    1 / sqrt(head_dim); `sliding_window` counts the keys a query sees, itself among them.
    """
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in qkv)
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    width = block_tables.shape[1] * block_size
    plan = plan or split_plan(
        rows=num_rows,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        width=width,
        num_sms=num_sms(q.device),
        itemsize=q.element_size(),
    )
    assert keys.is_contiguous()
    assert num_rows * num_heads * plan.num_splits <= workspace.sums.shape[0]
    out = q.new_empty(num_rows, num_heads, head_dim)
    norms = None if layout is None or layout.q_norm is None else (layout.q_norm, layout.k_norm)
    _decode_attention[(num_kv_heads * plan.num_splits, num_rows)](
        q,
        k,
        v,
        *(norms or (q, q)),
        q if layout is None else layout.rope_table,
        keys,
        values,
        block_tables,
        positions,
        out,
        workspace.sums,
        workspace.stats,
        workspace.arrived,
        *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
        block_tables.stride(0),
        plan.num_splits,
        plan.min_chunk,
        sliding_window or width,
        (scale or head_dim**-0.5) * math.log2(math.e),
        0.0 if layout is None else layout.eps,
        TURNS=layout is not None,
        NORMS=norms is not None,
        BLOCK_SIZE=block_size,
        **_shape_constants(num_heads // num_kv_heads, num_kv_heads, head_dim),
        **_plan_constants(plan),
        **launch_options(q.device),
    )
    return out


def _shape_constants(group: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Everything is padded to powers of two, queries to the rows of a tensor-core tile."""
    group_pad, head_pad = power_of_two(group), max(power_of_two(head_dim), MIN_DOT)
    return {
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "DOT_ROWS": max(group_pad, MIN_DOT),
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "MERGED": max(_MERGED_ELEMENTS // (group_pad * head_pad), 1),
    }


def _plan_constants(plan: SplitPlan) -> dict[str, int]:
    return {
        "TILE": plan.tile,
        "STAGES": plan.num_stages,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
