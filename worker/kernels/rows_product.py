"""Matrix times the vectors of up to 16 rows on tensor cores, with everything around the product folded in.

The weights are the left operand, and go from memory straight into the registers that the tensor cores read: with eight
numbers side by side in a thread, on both sides alike, the inner dimension is permuted and the sum is the same. Warps divide
the inner dimension. A program asks for its first weights before it waits for the kernel before it.

Vectors arrive scaled by the weight of their norm, and with sums of their squares: `W (g * x) * rsqrt(mean of squares)`.
Those that will be normed leave the same way.
"""

# Triton's tuples grow by `+` alone, and a type checker takes an empty one for empty for ever.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from worker.kernels.device import launch_options, power_of_two
from worker.kernels.gluon_pieces import ordered_key, trigger_next, wait_for_previous
from worker.kernels.row_tiles import RowTile, columns_for

_PLAIN = gl.constexpr(0)
_RESIDUAL = gl.constexpr(1)
_GATED = gl.constexpr(2)
_LOGITS = gl.constexpr(3)


@gluon.jit
def _request(place: gl.tensor, k: gl.tensor, LEFT: gl.constexpr, CHUNK: gl.constexpr) -> gl.tensor:
    """One chunk of weights, each of which is read once a step."""
    if LEFT < CHUNK:
        loaded = gl.load(place, mask=k < LEFT, other=0.0, eviction_policy="evict_first")
    else:
        loaded = gl.load(place, eviction_policy="evict_first")
    return loaded


@gluon.jit
def row_factors(
    squares: gl.tensor,
    rows: gl.tensor,
    eps: gl.tensor,
    SIZE: gl.constexpr,
    COLUMNS: gl.constexpr,
    NUM_SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr,
    NUM_WARPS: gl.constexpr,
) -> gl.tensor:
    """[COLUMNS]: what each row is multiplied by, from sums of its squares over SIZE numbers."""
    LANES: gl.constexpr = COLUMNS if COLUMNS < 32 else 32
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [NUM_WARPS, 1], [1, 0])
    part = gl.arange(0, SQUARES_PAD, gl.SliceLayout(1, SQUARES))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SQUARES))
    known = (part < NUM_SQUARES)[:, None] & (column < rows)[None, :]
    square = gl.sum(gl.load(squares + part[:, None] * COLUMNS + column[None, :], mask=known, other=0.0), axis=0)
    return gl.rsqrt(square / SIZE + eps)


@gluon.jit(do_not_specialize=["zero", "rows"])
def _rows_product(  # noqa: C901 - most of its branches are taken when it is compiled
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    out: gl.tensor,
    residual: gl.tensor,
    best: gl.tensor,
    scale: gl.tensor,
    squares: gl.tensor,
    next_squares: gl.tensor,
    rows: gl.tensor,
    zero: gl.tensor,
    eps: gl.tensor,
    KIND: gl.constexpr,
    SIZE: gl.constexpr,
    OUT: gl.constexpr,
    X_ROW: gl.constexpr,
    TILE: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    AHEAD: gl.constexpr,
    PACE: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    NUM_SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr,
    NORMS: gl.constexpr,
    SCALES: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    NUM_CHUNKS: gl.constexpr = (SIZE + CHUNK - 1) // CHUNK
    SHARE: gl.constexpr = CHUNK // NUM_WARPS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NUM_WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    SUMMED: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    # A gated tile is half gates and half ups: those of one output are summed by one thread.
    HALF: gl.constexpr = TILE // 2
    PER: gl.constexpr = HALF if KIND == _GATED else TILE
    first = gl.program_id(0) * PER

    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT))), 1), 2)
    member = gl.expand_dims(gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))), 0), 2)
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(1, LEFT))), 0), 1)
    k = warp * SHARE + inner + member * 0
    if KIND == _GATED:
        own = gl.minimum(first + member % HALF, OUT - 1) + member // HALF * OUT
        last = gl.minimum(first + HALF - 1, OUT - 1) + OUT
    else:
        own = gl.minimum(first + member, OUT - 1)
        last = gl.minimum(first + TILE - 1, OUT - 1)
    place = weight + own.to(gl.int64) * SIZE + k
    # A word that arrives about when its chunk does. What is made of it is zero, and nobody but us knows.
    word = (weight + last.to(gl.int64) * SIZE + (CHUNK - 8)).to(gl.pointer_type(gl.int16))
    weights = ()
    for c in gl.static_range(AHEAD):
        if PACE == 0 or c == 0:
            weights = weights + (_request(place + c * CHUNK, k, SIZE - c * CHUNK, CHUNK),)
        else:
            shift = gl.load(word + (c - 1) * CHUNK).to(gl.int32) & zero
            weights = weights + (_request(place + (c * CHUNK + gl.multiple_of(shift, 16)), k, SIZE - c * CHUNK, CHUNK),)

    output = first + gl.arange(0, TILE, gl.SliceLayout(1, SUMMED))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMMED))
    added = gl.full([TILE], 0.0, gl.float32, gl.SliceLayout(1, SUMMED))
    factor = added
    if BIAS:
        place_bias = output
        if KIND == _GATED:
            place_bias = gl.minimum(first + (output - first) % HALF, OUT - 1) + (output - first) // HALF * OUT
        added = gl.load(bias + gl.minimum(place_bias, OUT * (TILE // PER) - 1)).to(gl.float32)
    if SCALES:
        factor = gl.load(scale + gl.minimum(output, OUT - 1)).to(gl.float32)
    if PDL:
        wait_for_previous()
    live = (output < OUT)[:, None] & (column < rows)[None, :]
    place_out = column[None, :] * OUT + output[:, None]
    before = gl.full([TILE, COLUMNS], 0.0, gl.float32, SUMMED)
    if KIND == _RESIDUAL:
        before = gl.load(residual + place_out, mask=live, other=0.0)
    right_warp = gl.expand_dims(
        gl.expand_dims(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT))), 1), 2
    )
    right_inner = gl.expand_dims(gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT))), 0), 2)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))), 0), 1)
    right_k = right_warp * SHARE + right_inner + row * 0
    vectors = x + row * X_ROW + right_k
    acc = gl.full([NUM_WARPS, TILE, COLUMNS], 0.0, gl.float32, PRODUCT)
    for c in gl.static_range(NUM_CHUNKS):
        inside = row + right_k * 0 < rows
        if SIZE - c * CHUNK < CHUNK:
            inside = inside & (right_k < SIZE - c * CHUNK)
        vector = gl.load(vectors + c * CHUNK, mask=inside, other=0.0)
        if c + AHEAD < NUM_CHUNKS:
            later = place + (c + AHEAD) * CHUNK
            weights = weights + (_request(later, k, SIZE - (c + AHEAD) * CHUNK, CHUNK),)
        acc = gl.nvidia.ampere.mma_v2(weights[c], vector, acc)
    y = gl.sum(acc, axis=0)

    if NORMS:
        factors = row_factors(squares, rows, eps, SIZE, COLUMNS, NUM_SQUARES, SQUARES_PAD, NUM_WARPS)
        shrink = gl.convert_layout(factors, gl.SliceLayout(0, SUMMED))
        y = y * shrink[None, :]
    y = y + added[:, None]
    if KIND == _PLAIN:
        gl.store(out + place_out, y.to(out.dtype.element_ty), mask=live)
    if KIND == _RESIDUAL:
        y = y + before
        gl.store(residual + place_out, y, mask=live)
        gl.store(out + place_out, (y * factor[:, None]).to(out.dtype.element_ty), mask=live)
        y = gl.where(live, y, 0.0)
        gl.store(next_squares + gl.program_id(0) * COLUMNS + column, gl.sum(y * y, axis=0))
    if KIND == _GATED:
        pair = gl.permute(gl.reshape(y, (2, HALF, COLUMNS)), (1, 2, 0))
        gate, up = gl.split(pair)
        gated = gate / (1.0 + gl.exp(-gate)) * up
        PAIRED: gl.constexpr = gated.type.layout
        to = first + gl.arange(0, HALF, gl.SliceLayout(1, PAIRED))
        of = gl.arange(0, COLUMNS, gl.SliceLayout(0, PAIRED))
        stored = (to < OUT)[:, None] & (of < rows)[None, :]
        gl.store(out + of[None, :] * OUT + to[:, None], gated.to(out.dtype.element_ty), mask=stored)
    if KIND == _LOGITS:
        gl.store(out + place_out, y, mask=live)
        key = ordered_key(gl.where(live, y, float("-inf")), output[:, None] + column[None, :] * 0)
        gl.atomic_max(best + column, gl.max(key, axis=0), mask=column < rows, sem="relaxed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledRows:
    """Vectors that will be normed, scaled by the weight of that norm already."""

    x: torch.Tensor
    """[rows, size] in the model's type."""
    squares: torch.Tensor
    """[parts, columns] float32: sums of the squares of what was not scaled, part by part; see `columns_for`."""


def rows_plain(
    vectors: ScaledRows,
    weight: torch.Tensor,
    tile: RowTile,
    *,
    eps: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """weight [outputs, size], in the type of the vectors -> `out` [rows, outputs] in any float type."""
    _launch(_PLAIN, vectors.x, weight, tile, out=out, squares=vectors.squares, eps=eps, bias=bias)


def rows_logits(
    vectors: ScaledRows, weight: torch.Tensor, tile: RowTile, *, eps: float, out: torch.Tensor, best: torch.Tensor
) -> None:
    """The same, and `best` [rows] int64 rises to the key of each row's greedy choice (`greedy.ordered_key`)."""
    _launch(_LOGITS, vectors.x, weight, tile, out=out, squares=vectors.squares, eps=eps, best=best)


def rows_gated(
    vectors: ScaledRows,
    weight: torch.Tensor,
    tile: RowTile,
    *,
    eps: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """weight [2 * size, hidden], gates first -> `out` [rows, size]: silu(gate) * up, in the type of the vectors."""
    _launch(_GATED, vectors.x, weight, tile, out=out, squares=vectors.squares, eps=eps, bias=bias)


def rows_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: RowTile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor,
    scale: torch.Tensor,
    out: ScaledRows,
) -> None:
    """x [rows, size], its rows contiguous -> residual [rows, outputs] float32 += weight @ x + bias; `out`: scaled sums."""
    assert out.squares.shape[0] == triton.cdiv(len(weight), tile.out)
    _launch(_RESIDUAL, x, weight, tile, out=out.x, bias=bias, residual=residual, scale=scale, next_squares=out.squares)


def _launch(
    kind: gl.constexpr,
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: RowTile,
    *,
    out: torch.Tensor,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    next_squares: torch.Tensor | None = None,
) -> None:
    rows, outputs = out.shape
    num_squares = 1 if squares is None else len(squares)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    _rows_product[(triton.cdiv(len(weight), tile.out),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        out if residual is None else residual,
        out if best is None else best,
        weight if scale is None else scale,
        out if squares is None else squares,
        out if next_squares is None else next_squares,
        rows,
        0,
        eps,
        KIND=kind,
        SIZE=weight.shape[1],
        OUT=outputs,
        X_ROW=x.stride(0),
        TILE=tile.out,
        COLUMNS=columns_for(rows),
        CHUNK=tile.chunk,
        AHEAD=tile.ahead,
        PACE=tile.pace,
        NUM_WARPS=tile.num_warps,
        NUM_SQUARES=num_squares,
        SQUARES_PAD=power_of_two(num_squares),
        NORMS=squares is not None,
        SCALES=scale is not None,
        BIAS=bias is not None,
        num_warps=tile.num_warps,
        **launch_options(weight.device),
    )
