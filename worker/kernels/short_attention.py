"""Decode attention over short contexts: one program a row and KV head, that exchanges what its warps have found once.

Keys and values go from memory straight into the registers that the tensor cores read, and warps divide the tokens. For the
product with the values, the dimensions of a head are permuted so that a thread's numbers lie side by side in the pool.
Little shared memory is wanted: beside kernels that want none, a multiprocessor would have to be emptied before it is
divided anew.

What is read before the wait is what earlier steps have left: see `early_attention`.
"""

# Triton's tuples grow by `+` alone, and a type checker takes an empty one for empty for ever.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from worker.kernels.device import launch_options, power_of_two
from worker.kernels.gluon_pieces import trigger_next, wait_for_previous
from worker.kernels.qkv_layout import QkvLayout
from worker.kernels.short_plan import ShortPlan

_LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _halves(x: gl.tensor) -> gl.tensor:
    """The two halves of the last axis."""
    if len(x.shape) == 3:
        halves = gl.permute(gl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2)), (0, 1, 3, 2))
    else:
        halves = gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1))
    return gl.split(halves)


@gluon.jit
def _turned(
    x: gl.tensor, cos: gl.tensor, sin: gl.tensor, norm: gl.tensor, eps: gl.tensor, NORMS: gl.constexpr
) -> gl.tensor:
    """Heads along the last axis of `x`, normed and turned. A thread has both numbers of a pair; nothing changes threads."""
    if NORMS:
        AXIS: gl.constexpr = len(x.shape) - 1
        shrink = gl.rsqrt(gl.sum(x * x, axis=AXIS) / x.shape[AXIS] + eps)
        x = x * gl.expand_dims(shrink, AXIS) * norm
    low, high = _halves(x)
    cos, _ = _halves(cos)
    sin, _ = _halves(sin)
    pairs = gl.join(low * cos - high * sin, high * cos + low * sin)
    if len(x.shape) == 3:
        turned = gl.reshape(gl.permute(pairs, (0, 1, 3, 2)), (x.shape[0], x.shape[1], x.shape[2]))
    else:
        turned = gl.reshape(gl.permute(pairs, (0, 2, 1)), (x.shape[0], x.shape[1]))
    return gl.convert_layout(turned, x.type.layout, assert_trivial=True)


@gluon.jit
def _tokens(
    pool: gl.tensor,
    table: gl.tensor,
    kv_head: gl.tensor,
    token: gl.tensor,
    dims: gl.tensor,
    live: gl.tensor,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> gl.tensor:
    """What the pool holds of the tokens that are `live`. `token`, `dims` and `live` are broadcast."""
    block = gl.load(table + token // BLOCK_SIZE, mask=live, other=0).to(gl.int64)
    place = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    return gl.load(pool + place + dims, mask=live & (dims < HEAD_DIM), other=0.0)


@gluon.jit
def _permuted(value: gl.tensor, PRODUCT: gl.constexpr) -> gl.tensor:
    """Values as the right operand of a product, whose column 8 * i + a is dimension a * HEAD_DIM / 8 + i."""
    WARPS: gl.constexpr = value.shape[0]
    TOKENS: gl.constexpr = value.shape[1]
    DIMS: gl.constexpr = value.shape[2]
    parts = gl.permute(gl.reshape(value, (WARPS, TOKENS, 8, DIMS // 8)), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(parts, (WARPS, TOKENS, DIMS)), gl.DotOperandLayout(1, PRODUCT, 2))


@gluon.jit
def _scores(queries: gl.tensor, key: gl.tensor, live: gl.tensor, scale: gl.tensor, PRODUCT: gl.constexpr) -> gl.tensor:
    """[warps, queries, tokens] of keys [warps, dims, tokens]."""
    scores = gl.full([queries.shape[0], queries.shape[1], key.shape[2]], 0.0, gl.float32, PRODUCT)
    return gl.where(live, gl.nvidia.ampere.mma_v2(queries, key, scores) * scale, _LOWEST)


@gluon.jit
def _short_attention(
    qkv: gl.tensor,
    q_norm: gl.tensor,
    k_norm: gl.tensor,
    rope_table: gl.tensor,
    keys: gl.tensor,
    values: gl.tensor,
    block_tables: gl.tensor,
    positions: gl.tensor,
    out: gl.tensor,
    table_width: gl.tensor,
    scale: gl.tensor,
    eps: gl.tensor,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EAGER: gl.constexpr,
    SHARE: gl.constexpr,
    TILES: gl.constexpr,
    NORMS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    VALUES: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: gl.constexpr = HEAD_DIM // 2
    TILE: gl.constexpr = SHARE * NUM_WARPS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NUM_WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, HEAD_DIM // 32], [1, 1, 32], [1, NUM_WARPS, 1], [2, 1, 0])
    dtype: gl.constexpr = keys.dtype.element_ty
    kv_head = gl.program_id(0)
    row = gl.program_id(1).to(gl.int64)
    position = gl.load(positions + row).to(gl.int32)
    table = block_tables + row * table_width

    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT))), 1), 2)
    key_dims = gl.expand_dims(gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT))), 0), 2)
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))), 0), 1)
    key_token = warp * SHARE + inner
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, VALUES))), 1), 2)
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(2, VALUES))), 0), 2)
    value_dims = gl.expand_dims(
        gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, VALUES))), 0), 1
    )
    value_token = warp * SHARE + inner
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, PRODUCT))), 1), 2)
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(1, PRODUCT))), 0), 1)
    score_token = warp * SHARE + inner
    old_keys, old_values = (), ()
    for tile in gl.static_range(TILES):
        first = tile * TILE
        # All of the tier's tokens, so that nothing waits for the position: those past it are read and not used.
        stop = WIDTH if EAGER else position
        old_key = _tokens(
            keys, table, kv_head, key_token + first, key_dims, key_token + first < stop,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        old_value = _tokens(
            values, table, kv_head, value_token + first, value_dims, value_token + first < stop,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if EAGER:
            old_value = gl.where(value_token + first + value_dims * 0 < position, old_value, 0.0)
        old_keys, old_values = old_keys + (old_key,), old_values + (old_value,)
    slot = gl.load(table + position // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    warp = gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(1, LEFT))), 1)
    dim = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, LEFT))), 0) + warp * 0
    member = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))), 0), 2)
    query_dim = gl.expand_dims(dim, 1)
    is_query = member + query_dim * 0 < GROUP
    angle = rope_table + position * HEAD_DIM + dim % HALF
    k_cos, k_sin = gl.load(angle), gl.load(angle + HALF)
    angle = rope_table + position * HEAD_DIM + query_dim % HALF + member * 0
    q_cos, q_sin = gl.load(angle, mask=is_query, other=0.0), gl.load(angle + HALF, mask=is_query, other=0.0)
    q_scale, k_scale = q_cos, k_cos
    if NORMS:
        q_scale = gl.load(q_norm + query_dim + member * 0, mask=is_query, other=0.0).to(gl.float32)
        k_scale = gl.load(k_norm + dim).to(gl.float32)
    if PDL:
        wait_for_previous()

    base = qkv + row * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    raw = gl.load(base + (kv_head * GROUP + member) * HEAD_DIM + query_dim, mask=is_query, other=0.0)
    new = base + (NUM_HEADS + kv_head) * HEAD_DIM
    raw_key = gl.load(new + dim)
    out_dim = gl.expand_dims(gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, OUT))), 0), 1)
    out_head = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP_PAD, gl.SliceLayout(0, gl.SliceLayout(2, OUT))), 0), 2)
    value = gl.load(new + NUM_KV_HEADS * HEAD_DIM + out_dim).to(dtype)
    queries = _turned(raw, q_cos, q_sin, q_scale, eps, NORMS).to(dtype)
    key = _turned(raw_key, k_cos, k_sin, k_scale, eps, NORMS).to(dtype)
    written = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
    gl.store(keys + written + dim, key, mask=warp + dim * 0 == 0)
    gl.store(values + written + out_dim, value)

    new_score = gl.sum(queries.to(gl.float32) * gl.expand_dims(key.to(gl.float32), 1), axis=2) * scale
    nothing = gl.full([NUM_WARPS, 16, HEAD_DIM], 0.0, gl.float32, PRODUCT)
    scores = _scores(queries, old_keys[0], score_token < position, scale, PRODUCT)
    highest = gl.max(scores, axis=2)
    shares = gl.exp2(scores - gl.expand_dims(highest, 2))
    total = gl.sum(shares, axis=2)
    left = gl.convert_layout(shares.to(dtype), gl.DotOperandLayout(0, PRODUCT, 2))
    acc = gl.nvidia.ampere.mma_v2(left, _permuted(old_values[0], PRODUCT), nothing)
    for tile in gl.static_range(1, TILES):
        if tile * TILE < position:
            scores = _scores(queries, old_keys[tile], score_token + tile * TILE < position, scale, PRODUCT)
            higher = gl.maximum(highest, gl.max(scores, axis=2))
            shares = gl.exp2(scores - gl.expand_dims(higher, 2))
            fade = gl.exp2(highest - higher)
            total = total * fade + gl.sum(shares, axis=2)
            left = gl.convert_layout(shares.to(dtype), gl.DotOperandLayout(0, PRODUCT, 2))
            acc = gl.nvidia.ampere.mma_v2(left, _permuted(old_values[tile], PRODUCT), acc * gl.expand_dims(fade, 2))
            highest = higher

    # Every warp's result and its weight, and the weight of the new token, to all warps. Half of the queries are padding.
    done = gl.reshape(acc / gl.expand_dims(total, 2), (NUM_WARPS, 2, 8, HEAD_DIM // 8, 8))
    done, _ = gl.split(gl.permute(done, (0, 2, 4, 3, 1)))
    done = gl.reshape(done, (NUM_WARPS, 8, HEAD_DIM)).to(dtype)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    WEIGHED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    parts = gl.allocate_shared_memory(dtype, [NUM_WARPS, 8, HEAD_DIM], PARTS, done)
    stats = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, 16], WEIGHED, highest + gl.log2(total))
    news = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, 16], WEIGHED, new_score)
    HEADS: gl.constexpr = gl.SliceLayout(2, OUT)
    new_stat = news.slice(0, 1).slice(0, GROUP_PAD, dim=1).load(HEADS)
    top = new_stat
    for w in gl.static_range(NUM_WARPS):
        top = gl.maximum(top, stats.slice(w, 1).slice(0, GROUP_PAD, dim=1).load(HEADS))
    share = gl.exp2(new_stat - top)
    whole = share
    x = gl.expand_dims(share, 2) * value.to(gl.float32)
    for w in gl.static_range(NUM_WARPS):
        share = gl.exp2(stats.slice(w, 1).slice(0, GROUP_PAD, dim=1).load(HEADS) - top)
        whole += share
        x += gl.expand_dims(share, 2) * parts.slice(w, 1).slice(0, GROUP_PAD, dim=1).load(OUT).to(gl.float32)
    place = out + row * (NUM_HEADS * HEAD_DIM) + (kv_head * GROUP + out_head) * HEAD_DIM + out_dim
    gl.store(place, (x / gl.expand_dims(whole, 2)).to(dtype), mask=out_head + out_dim * 0 < GROUP)


@cache
def _value_layout(num_warps: int, share: int, head_dim: int) -> gl.DistributedLinearLayout:
    """[warps, tokens, dims]: where a thread finds the values that are its own after `_permuted`, in the pool's order."""
    per = head_dim // 8
    bits = [1 << bit for bit in range(10)]
    return gl.DistributedLinearLayout(
        reg_bases=[
            *([0, 0, bit] for bit in bits if bit < per),
            *([0, bit, 0] for bit in bits if bit < share and bit not in (2, 4)),
        ],
        lane_bases=[[0, 2, 0], [0, 4, 0], *([0, 0, bit * per] for bit in (1, 2, 4))],
        warp_bases=[[bit, 0, 0] for bit in bits if bit < num_warps],
        block_bases=[],
        shape=[num_warps, share, head_dim],
    )


def short_attention(
    qkv: torch.Tensor,
    layout: QkvLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    plan: ShortPlan,
    *,
    out: torch.Tensor,
) -> None:
    """Store the new keys and values, and attend -> `out` [rows, num_heads * head_dim] in the model's type.

    qkv [rows, heads * head_dim] float32, contiguous, as `layout` says; keys and values are one layer's pool
    [num_blocks, block_size, kv_heads, head_dim]; block_tables [rows, width] int32, its rows maybe further apart than
    `width`; positions [rows] int64, of the new tokens.
    """
    assert qkv.is_contiguous()
    assert keys.is_contiguous()
    assert block_tables.shape[1] * keys.shape[1] <= plan.max_width
    num_heads, num_kv_heads, head_dim = layout.num_heads, layout.num_kv_heads, layout.head_dim
    norms = None if layout.q_norm is None else (layout.q_norm, layout.k_norm)
    _short_attention[(num_kv_heads, len(qkv))](
        qkv,
        *(norms or (qkv, qkv)),
        layout.rope_table,
        keys,
        values,
        block_tables,
        positions,
        out,
        block_tables.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        layout.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_PAD=power_of_two(num_heads // num_kv_heads),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys.shape[1],
        WIDTH=block_tables.shape[1] * keys.shape[1],
        EAGER=plan.eager,
        SHARE=plan.share,
        TILES=plan.num_tiles,
        NORMS=norms is not None,
        NUM_WARPS=plan.num_warps,
        VALUES=_value_layout(plan.num_warps, plan.share, head_dim),
        num_warps=plan.num_warps,
        **launch_options(qkv.device),
    )
