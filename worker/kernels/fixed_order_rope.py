"""From the parts of a projection to turned queries, and keys and values in the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two
from worker.kernels.fixed_order_matmul import SplitSums
from worker.kernels.qkv_layout import QkvLayout

_HEADS_A_PROGRAM = 8


@triton.jit
def _head_halves(
    place: tl.tensor, stride: tl.tensor, live: tl.tensor, SPLITS: tl.constexpr, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The lower and upper halves of heads, added up over the parts of a product."""
    low = tl.load(place, mask=live, other=0.0)
    high = tl.load(place + HALF, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(place + split * stride, mask=live, other=0.0)
        high += tl.load(place + split * stride + HALF, mask=live, other=0.0)
    return low, high


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _turn_and_store(
    parts: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    rope_table: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    dtype: tl.constexpr = queries.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    in_half = pair < HALF
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    live = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    if PDL:
        wait_for_previous()
    column = head * HEAD_DIM + pair
    low, high = _head_halves(parts + row * TOTAL + column, rows.to(tl.int64) * TOTAL, live, SPLITS, HALF)
    if BIAS:
        low += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
        high += tl.load(bias + column + HALF, mask=live, other=0.0).to(tl.float32)
    value_low, value_high = low, high
    if NORMS:
        shrink = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
        q_low, k_low = tl.load(q_norm + pair, mask=in_half, other=0.0), tl.load(k_norm + pair, mask=in_half, other=0.0)
        q_high = tl.load(q_norm + HALF + pair, mask=in_half, other=0.0)
        k_high = tl.load(k_norm + HALF + pair, mask=in_half, other=0.0)
        low = low * shrink * tl.where(is_query, q_low, k_low).to(tl.float32)
        high = high * shrink * tl.where(is_query, q_high, k_high).to(tl.float32)
    angle = rope_table + tl.load(positions + row) * HEAD_DIM + pair
    cos, sin = tl.load(angle, mask=in_half, other=0.0), tl.load(angle + HALF, mask=in_half, other=0.0)
    turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
    low = tl.where(is_value, value_low, turned_low).to(dtype)
    high = tl.where(is_value, value_high, turned_high).to(dtype)
    place = queries + row * (NUM_HEADS * HEAD_DIM) + column
    tl.store(place, low, mask=live & is_query)
    tl.store(place + HALF, high, mask=live & is_query)
    first = tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)
    cached = (tl.load(slots + row) * NUM_KV_HEADS + head - first) * HEAD_DIM + pair
    is_key = live & ~is_query & ~is_value
    tl.store(keys + cached, low, mask=is_key)
    tl.store(keys + cached + HALF, high, mask=is_key)
    tl.store(values + cached, low, mask=live & is_value)
    tl.store(values + cached + HALF, high, mask=live & is_value)


def turn_and_store(
    sums: SplitSums,
    bias: torch.Tensor | None,
    layout: QkvLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The product, read as `layout` says -> queries [rows, num_heads * head_dim], normed and turned; the rest to `slots`.

    positions and slots [rows] int64; keys and values are one layer's pool [num_blocks, block_size, num_kv_heads, head_dim].
    """
    assert keys.is_contiguous()
    splits, rows, _ = sums.parts.shape
    queries = keys.new_empty(rows, layout.num_heads * layout.head_dim)
    heads = layout.num_heads + 2 * layout.num_kv_heads
    _turn_and_store[(rows, triton.cdiv(heads, _HEADS_A_PROGRAM))](
        sums.parts,
        queries if bias is None else bias,
        positions,
        slots,
        layout.rope_table,
        queries if layout.q_norm is None else layout.q_norm,
        queries if layout.k_norm is None else layout.k_norm,
        queries,
        keys,
        values,
        rows,
        layout.eps,
        SPLITS=splits,
        NUM_HEADS=layout.num_heads,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        HALF_PAD=power_of_two(layout.head_dim // 2),
        HEADS=_HEADS_A_PROGRAM,
        NORMS=layout.q_norm is not None,
        BIAS=bias is not None,
        num_warps=2,
        enable_fp_fusion=False,
        **launch_options(queries.device),
    )
    return queries
