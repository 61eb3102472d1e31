"""Matrix times a few vectors, with everything around the product folded in.

A program asks for all the weights of its outputs before it waits for the kernel before it, and keeps them in registers.
The norm of a vector is a factor that comes last: W (g * x) / rms(x).
"""

# Triton's tuples grow by `+` alone, and a type checker takes an empty one for empty for ever.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options
from worker.kernels.greedy import ordered_key
from worker.kernels.late_merge import merge_heads, num_partials
from worker.kernels.partials import Partials
from worker.kernels.vector_tiles import Tile

_PLAIN = tl.constexpr(0)
_RESIDUAL = tl.constexpr(1)
_GATED = tl.constexpr(2)
_LOGITS = tl.constexpr(3)


@triton.jit
def _request(place: tl.tensor, k: tl.tensor, LEFT: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """One chunk of weights, each of which is read once a step."""
    if LEFT < CHUNK:
        loaded = tl.load(place, mask=k < LEFT, other=0.0, eviction_policy="evict_first")
    else:
        loaded = tl.load(place, eviction_policy="evict_first")
    return loaded


@triton.jit
def _read(place: tl.tensor, k: tl.tensor, LEFT: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """One chunk of a vector."""
    return tl.load(place, mask=k < LEFT, other=0.0) if LEFT < CHUNK else tl.load(place)


@triton.jit
def _products(weights: tl.tensor, x: tl.tensor) -> tl.tensor:
    """[.., .., n] each -> [.., .., n / 8]: what a thread can add up without asking another."""
    product = weights.to(tl.float32) * x
    shape: tl.constexpr = product.shape
    return tl.sum(tl.reshape(product, (shape[0], shape[1], shape[2] // 8, 8)), axis=3)


@triton.jit(do_not_specialize=["zero"])
def _gemv(  # noqa: C901 - most of its branches are taken when it is compiled
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    residual: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    positions: tl.tensor,
    zero: tl.tensor,
    eps: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
    ABREAST: tl.constexpr,
    CHUNK: tl.constexpr,
    PACE: tl.constexpr,
    NORMS: tl.constexpr,
    BIAS: tl.constexpr,
    MERGES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    LATE_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    NUM_CHUNKS: tl.constexpr = (SIZE + CHUNK - 1) // CHUNK
    IS_GATED: tl.constexpr = KIND == _GATED
    UPS: tl.constexpr = OUT * SIZE
    first = tl.program_id(0) * TILE
    # Outputs abreast come first: so Triton gives them to different warps, in the matrix and in the vectors alike.
    rows = first + tl.arange(0, ABREAST)[:, None] * (TILE // ABREAST) + tl.arange(0, TILE // ABREAST)[None, :]
    last = first + TILE - 1
    own = rows
    if OUT % TILE != 0:
        own = tl.minimum(rows, OUT - 1)
        last = tl.minimum(last, OUT - 1)
    live = rows < OUT
    k = tl.arange(0, CHUNK)[None, None, :] + tl.zeros((ABREAST, 1, 1), tl.int32)
    place = weight + own[:, :, None].to(tl.int64) * SIZE + k
    # A word that arrives about when its chunk does. What is made of it is zero, and nobody but us knows.
    word = (weight + last.to(tl.int64) * SIZE + (CHUNK - 8)).to(tl.pointer_type(tl.int16))
    gates, ups = (), ()
    for c in tl.static_range(NUM_CHUNKS):
        if c == 0 or PACE == 0:
            gates = gates + (_request(place + c * CHUNK, k, SIZE - c * CHUNK, CHUNK),)
        else:
            shift = tl.load(word + (UPS if IS_GATED else 0) + (c - 1) * CHUNK).to(tl.int32) & zero
            offset = c * CHUNK + tl.multiple_of(shift, 16)
            gates = gates + (_request(place + offset, k, SIZE - c * CHUNK, CHUNK),)
        if IS_GATED:
            if PACE > 1 and c + 1 < NUM_CHUNKS:
                shift = tl.load(word + c * CHUNK).to(tl.int32) & zero
                offset = UPS + c * CHUNK + tl.multiple_of(shift, 16)
                ups = ups + (_request(place + offset, k, SIZE - c * CHUNK, CHUNK),)
            elif PACE > 0 and c > 0:
                ups = ups + (_request(place + UPS + offset, k, SIZE - c * CHUNK, CHUNK),)
            else:
                ups = ups + (_request(place + UPS + c * CHUNK, k, SIZE - c * CHUNK, CHUNK),)
    scales = ()
    if NORMS:
        for c in tl.static_range(NUM_CHUNKS):
            scales = scales + (_read(norm + c * CHUNK + k, k, SIZE - c * CHUNK, CHUNK),)
    added = tl.zeros((ABREAST, TILE // ABREAST), tl.float32)
    added_up = tl.zeros((ABREAST, TILE // ABREAST), tl.float32)
    if BIAS:
        added = tl.load(bias + own).to(tl.float32)
        if IS_GATED:
            added_up = tl.load(bias + OUT + own).to(tl.float32)
    counts = ()
    if MERGES:
        for row in tl.static_range(ROWS):
            length = tl.load(positions + row).to(tl.int32)
            counts = counts + (num_partials(length, SPLITS, LATE_SPLITS, MIN_CHUNK, LONG_CHUNK),)
    if PDL:
        wait_for_previous()
    vectors = ()
    residuals = ()
    for row in tl.static_range(ROWS):
        if not MERGES:
            for c in tl.static_range(NUM_CHUNKS):
                vectors = vectors + (_read(x + row * SIZE + c * CHUNK + k, k, SIZE - c * CHUNK, CHUNK),)
        if KIND == _RESIDUAL:
            residuals = residuals + (tl.load(residual + row * OUT + rows, mask=live, other=0.0),)
    for row in tl.static_range(ROWS):
        square = tl.zeros((ABREAST, 1, CHUNK // 8), tl.float32)
        gate = tl.zeros((ABREAST, TILE // ABREAST, CHUNK // 8), tl.float32)
        up = tl.zeros((ABREAST, TILE // ABREAST, CHUNK // 8), tl.float32)
        for c in tl.static_range(NUM_CHUNKS):
            if MERGES:
                head, part = c * (CHUNK // HEAD_DIM), row * SPLITS * NUM_HEADS
                merged = merge_heads(sums, stats, part, head, counts[row], NUM_HEADS, HEAD_DIM, CHUNK, LATE_SPLITS)
                vector = tl.reshape(merged, (1, 1, CHUNK))
            else:
                vector = vectors[row * NUM_CHUNKS + c].to(tl.float32)
            if NORMS:
                square += _products(vector, vector)
                vector = vector * scales[c].to(tl.float32)
            gate += _products(gates[c], vector)
            if IS_GATED:
                up += _products(ups[c], vector)
        y = tl.sum(gate, axis=2)
        if NORMS:
            shrink = tl.rsqrt(tl.sum(square, axis=2) / SIZE + eps)
            y = y * shrink
        y += added
        place_out = out + row * OUT + rows
        if KIND == _PLAIN:
            tl.store(place_out, y, mask=live)
        if KIND == _RESIDUAL:
            y += residuals[row]
            tl.store(residual + row * OUT + rows, y, mask=live)
            tl.store(place_out, y.to(out.dtype.element_ty), mask=live)
        if KIND == _GATED:
            z = tl.sum(up, axis=2)
            if NORMS:
                z = z * shrink
            tl.store(place_out, (y * tl.sigmoid(y) * (z + added_up)).to(out.dtype.element_ty), mask=live)
        if KIND == _LOGITS:
            tl.store(place_out, y, mask=live)
            key = ordered_key(tl.where(live, y, float("-inf")), rows)
            tl.atomic_max(best + row, tl.max(tl.max(key, axis=1), axis=0), sem="relaxed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """A root mean square norm of the vectors before the product."""

    weight: torch.Tensor
    """[size]."""
    eps: float


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """x [rows, size] and weight [outputs, size] in one half-precision type -> `out` [rows, outputs] float32."""
    _launch(_PLAIN, x, weight, tile, norm=norm, bias=bias, out=out)


def gemv_logits(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, norm: Norm, out: torch.Tensor, best: torch.Tensor
) -> None:
    """The same, and `best` [rows] int64 rises to the key of each row's greedy choice (`greedy.ordered_key`)."""
    _launch(_LOGITS, x, weight, tile, norm=norm, out=out, best=best)


def gemv_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """x [rows, size] -> residual [rows, outputs] float32 += weight @ x + bias; `out`: the sum in the type of `x`."""
    _launch(_RESIDUAL, x, weight, tile, bias=bias, out=out, residual=residual)


def gemv_merge_add(
    partials: Partials,
    weight: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The same for what `early_attention` has left: x is merged while it is read."""
    _launch(_RESIDUAL, partials.sums, weight, tile, bias=bias, out=out, residual=residual, partials=partials)


def gemv_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    norm: Norm,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """weight [2 * size, hidden], gates first -> `out` [rows, size]: silu(gate) * up, in the type of `x`."""
    _launch(_GATED, x, weight, tile, norm=norm, bias=bias, out=out)


def _launch(
    kind: tl.constexpr,
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    out: torch.Tensor,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
    partials: Partials | None = None,
) -> None:
    rows, outputs = out.shape
    _gemv[(triton.cdiv(outputs, tile.out),)](
        x,
        weight if norm is None else norm.weight,
        weight,
        weight if bias is None else bias,
        out,
        out if residual is None else residual,
        out if best is None else best,
        out if partials is None else partials.sums,
        out if partials is None else partials.stats,
        out if partials is None else partials.positions,
        0,
        0.0 if norm is None else norm.eps,
        KIND=kind,
        ROWS=rows,
        SIZE=weight.shape[1],
        OUT=outputs,
        TILE=tile.out,
        ABREAST=tile.abreast,
        CHUNK=tile.chunk,
        PACE=tile.pace,
        NORMS=norm is not None,
        BIAS=bias is not None,
        MERGES=partials is not None,
        num_warps=tile.num_warps,
        **_merge_constants(partials),
        **launch_options(weight.device),
    )


def _merge_constants(partials: Partials | None) -> dict[str, Any]:
    if partials is None:
        return dict.fromkeys(("NUM_HEADS", "HEAD_DIM", "SPLITS", "LATE_SPLITS", "MIN_CHUNK", "LONG_CHUNK"), 1)
    plan = partials.plan
    return {
        "NUM_HEADS": partials.num_heads,
        "HEAD_DIM": partials.head_dim,
        "SPLITS": plan.num_splits,
        "LATE_SPLITS": plan.late_splits,
        "MIN_CHUNK": plan.min_chunk,
        "LONG_CHUNK": plan.long_chunk,
    }
