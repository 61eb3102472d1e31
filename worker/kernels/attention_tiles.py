"""What the attention kernels are put together from: heads as they are stored, tokens of the pool, the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

MIN_DOT = 16
"""Rows and columns that a tensor core takes at least."""


@triton.jit
def load_head(
    place: tl.tensor,
    norm: tl.tensor,
    rope_table: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TURNS: tl.constexpr,
    NORMS: tl.constexpr,
) -> tl.tensor:
    """[heads, HEAD_PAD] from `place` [heads, 1], normed and turned, rounded to the type they are stored in."""
    dtype: tl.constexpr = place.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HEAD_PAD)[None, :]
    inside = live & (dims < HEAD_DIM)
    raw = tl.load(place + dims, mask=inside, other=0.0)
    if TURNS:
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        x = raw.to(tl.float32)
        other = tl.load(place + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            shrink = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
            weight = tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            other_weight = tl.load(norm + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            x = (x * shrink * weight).to(dtype).to(tl.float32)
            other = (other * shrink * other_weight).to(dtype).to(tl.float32)
        angle = rope_table + position * HEAD_DIM + tl.where(dims < HALF, dims, dims - HALF)
        cos = tl.load(angle, mask=dims < HEAD_DIM, other=0.0)
        sin = tl.load(angle + HALF, mask=dims < HEAD_DIM, other=0.0)
        raw = (x * cos + other * tl.where(dims < HALF, -sin, sin)).to(dtype)
    return raw


@triton.jit
def fold_tile(
    queries: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    live: tl.tensor,
    scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
) -> tl.tensor:
    """One step of the online softmax: key and value [tokens, HEAD_PAD], of which those that are `live` count.

    `live` is [1, tokens] or [queries, tokens].
    """
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(live, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def cached_tokens(
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    token: tl.tensor,
    live: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tuple:
    """Keys and values [tokens, HEAD_PAD] of tokens of a row. Those that are not `live` are never read."""
    dims = tl.arange(0, HEAD_PAD)
    block = tl.load(table + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    place = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(keys + place[:, None] + dims[None, :], mask=inside, other=0.0)
    value = tl.load(values + place[:, None] + dims[None, :], mask=inside, other=0.0)
    return key, value


@triton.jit
def begin_with_new(
    queries: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    owns_new: tl.tensor,
    scale: tl.tensor,
    DOT_ROWS: tl.constexpr,
    HEAD_PAD: tl.constexpr,
) -> tl.tuple:
    """(highest, total, acc) of the softmax over the new token, key and value [1, HEAD_PAD]; over nothing for others' programs."""
    new_score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), axis=1) * scale
    highest = tl.where(owns_new, new_score, float("-inf"))
    total = tl.where(owns_new, 1.0, 0.0) + tl.zeros((DOT_ROWS,), tl.float32)
    acc = value.to(tl.float32) + tl.zeros((DOT_ROWS, HEAD_PAD), tl.float32)
    return highest, total, acc


@triton.jit
def attend_chunk(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Online softmax over cached tokens [start, stop). Tokens from `stop` on are never read."""
    for tile in tl.range(start, stop, TILE, num_stages=STAGES):
        token = tile + tl.arange(0, TILE)
        live = token < stop
        key, value = cached_tokens(
            keys, values, table, kv_head, token, live, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE
        )
        highest, total, acc = fold_tile(queries, key, value, live[None, :], scale, highest, total, acc)
    return highest, total, acc
