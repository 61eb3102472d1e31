"""Norm and rotation of queries and keys, and the write of keys and values to the pool, in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options, power_of_two
from worker.kernels.qkv_layout import QkvLayout

_HEADS_A_PROGRAM = 8


@triton.jit
def _norm_half(
    half: tl.tensor,
    shrink: tl.tensor,
    is_query: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    live: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    q_weight = tl.load(q_norm, mask=live, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm, mask=live, other=0.0).to(tl.float32)
    return (half * shrink * tl.where(is_query, q_weight, k_weight)).to(dtype).to(tl.float32)


@triton.jit
def _rope_and_cache(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    rope_table: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    live = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (pair < HALF)
    if PDL:
        wait_for_previous()
    # A thread holds both halves of its pairs, so that turning in place is safe.
    place = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + pair
    raw_low = tl.load(place, mask=live, other=0.0)
    raw_high = tl.load(place + HALF, mask=live, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORMS:
        shrink = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
        is_query, in_half = head < NUM_HEADS, pair < HALF
        low = _norm_half(low, shrink, is_query, q_norm + pair, k_norm + pair, in_half, dtype)
        high = _norm_half(high, shrink, is_query, q_norm + HALF + pair, k_norm + HALF + pair, in_half, dtype)
    angle = rope_table + tl.load(positions + token) * HEAD_DIM + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0)
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)
    low, high = low * cos - high * sin, high * cos + low * sin
    turned_low = tl.where(is_value, raw_low, low.to(dtype))
    turned_high = tl.where(is_value, raw_high, high.to(dtype))
    tl.store(place, turned_low, mask=live & ~is_value)
    tl.store(place + HALF, turned_high, mask=live & ~is_value)
    first = tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)
    cached = (tl.load(slots + token) * NUM_KV_HEADS + head - first) * HEAD_DIM + pair
    is_key = live & (head >= NUM_HEADS) & ~is_value
    tl.store(keys + cached, turned_low, mask=is_key)
    tl.store(keys + cached + HALF, turned_high, mask=is_key)
    tl.store(values + cached, turned_low, mask=live & is_value)
    tl.store(values + cached + HALF, turned_high, mask=live & is_value)


def rope_and_cache(
    qkv: torch.Tensor,
    layout: QkvLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Norm and turn the queries and keys of `qkv` in place; store keys and values at `slots`.

    qkv [tokens, heads * head_dim], contiguous, as `layout` says; positions and slots [tokens] int64; keys and values are
    one layer's pool [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
    """
    assert qkv.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    heads = layout.num_heads + 2 * layout.num_kv_heads
    _rope_and_cache[(qkv.shape[0], triton.cdiv(heads, _HEADS_A_PROGRAM))](
        qkv,
        positions,
        slots,
        layout.rope_table,
        qkv if layout.q_norm is None else layout.q_norm,
        qkv if layout.k_norm is None else layout.k_norm,
        keys,
        values,
        layout.eps,
        NUM_HEADS=layout.num_heads,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        HALF_PAD=power_of_two(layout.head_dim // 2),
        HEADS=_HEADS_A_PROGRAM,
        NORMS=layout.q_norm is not None,
        num_warps=2,
        **launch_options(qkv.device),
    )
