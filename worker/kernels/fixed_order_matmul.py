"""Matrix products that take every sum in one order, however many rows there are.

Weights are the left operand of the tensor cores and rows of the step the right one: more rows make wider instructions, which
add up the same products of each output, sixteen inputs at a time. How the inputs are divided among programs depends on the
matrix alone; what each of them found is left side by side, and added in order by the kernel that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two

ROW_TILES = (16, 32, 64, 128)
"""Rows of one program."""
_OUT_TILE, _WIDE_OUT_TILE = 64, 128
"""Weight rows of one program: what an instruction takes, and twice that where there are many rows."""
_PROGRAMS = 128
_MIN_SPLIT, _SPLIT_UNIT = 256, 128
"""Inputs of one program, at least, and a divisor of them."""
_MAX_SPLITS = 8
_PREFETCHED_BYTES = 64 << 10
_LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class SplitSums:
    """What the programs of a product left: the product is their sum over the first dimension, in order."""

    parts: torch.Tensor
    """[splits, rows, outputs] float32."""

    def total(self) -> torch.Tensor:
        """[rows, outputs] float32."""
        out = self.parts[0]
        for part in self.parts[1:]:
            out = out + part
        return out


@triton.jit
def _prefetch(place: tl.tensor) -> None:
    """Bring lines of memory that nobody changes to the second cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _fixed_order_matmul(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    OUT_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    OWN: tl.constexpr = OUT_TILE // 2 if GATED else OUT_TILE
    split = tl.program_id(2)
    own = tl.program_id(1) * OWN + tl.arange(0, OUT_TILE) % OWN
    line = tl.minimum(own, OUT - 1).to(tl.int64) + (tl.arange(0, OUT_TILE) // OWN) * OUT
    weights = weight + line[:, None] * SIZE
    first = split * SPLIT
    if PDL:
        _prefetch(weights + first + tl.minimum(tl.arange(0, LINES)[None, :] * LINE, SIZE - first - 1))
        wait_for_previous()
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    live = row < rows
    vectors = x + row[:, None].to(tl.int64) * SIZE
    acc = tl.zeros((OUT_TILE, ROW_TILE), tl.float32)
    for start in tl.range(0, SPLIT, CHUNK, num_stages=STAGES):
        k = first + start + tl.arange(0, CHUNK)
        if SIZE % SPLIT == 0:
            left = tl.load(weights + k[None, :])
            right = tl.load(vectors + k[None, :], mask=live[:, None], other=0.0)
        else:
            left = tl.load(weights + k[None, :], mask=k[None, :] < SIZE, other=0.0)
            right = tl.load(vectors + k[None, :], mask=live[:, None] & (k[None, :] < SIZE), other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    sums = tl.trans(acc)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (ROW_TILE, 2, OWN)), (0, 2, 1)))
        column = tl.program_id(1) * OWN + tl.arange(0, OWN)
        if BIAS:
            gate += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + OUT + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
        sums = gate * tl.sigmoid(gate) * up
        place = out + row[:, None].to(tl.int64) * OUT + column[None, :]
        tl.store(place, sums.to(out.dtype.element_ty), mask=live[:, None] & (column < OUT)[None, :])
    else:
        place = out + (split.to(tl.int64) * rows + row[:, None]) * OUT + own[None, :]
        tl.store(place, sums, mask=live[:, None] & (own < OUT)[None, :])


def matmul(x: torch.Tensor, weight: torch.Tensor, *, row_tile: int, num_splits: int | None = None) -> SplitSums:
    """x [rows, size] and weight [outputs, size], contiguous and of one type -> the product in parts.

    `row_tile` is one of ROW_TILES, and changes no bit where `worker.deterministic.verify` has found so. `num_splits` is for
    matrices whose reader cannot add.
    """
    outputs, size = weight.shape
    splits = num_splits or split_count(outputs, size)
    out = torch.empty(splits, len(x), outputs, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, splits=splits, row_tile=row_tile, is_gated=False)
    return SplitSums(out)


def matmul_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, row_tile: int) -> torch.Tensor:
    """weight [2 * size, hidden], gates first -> silu(gate) * up [rows, size] in the type of `x`."""
    out = x.new_empty(len(x), weight.shape[0] // 2)
    _launch(x, weight, bias, out, splits=1, row_tile=row_tile, is_gated=True)
    return out


def split_count(outputs: int, size: int) -> int:
    """Programs that share the inputs of an output: enough of them for a GPU, of long enough shares."""
    splits, tiles = 1, triton.cdiv(outputs, _OUT_TILE)
    while tiles * splits < _PROGRAMS and splits < _MAX_SPLITS and size // (2 * splits) >= _MIN_SPLIT:
        splits *= 2
    return splits


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    splits: int,
    row_tile: int,
    is_gated: bool,
) -> None:
    assert x.is_contiguous()
    assert weight.is_contiguous()
    rows, outputs, size = len(x), weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    tile = tile_constants(row_tile, size, x.element_size())
    own = tile["OUT_TILE"] // (2 if is_gated else 1)
    split = triton.cdiv(triton.cdiv(size, splits), _SPLIT_UNIT) * _SPLIT_UNIT
    line = _LINE_BYTES // x.element_size()
    _fixed_order_matmul[(triton.cdiv(rows, row_tile), triton.cdiv(outputs, own), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        OUT=outputs,
        SIZE=size,
        SPLIT=split,
        ROW_TILE=row_tile,
        GATED=is_gated,
        BIAS=bias is not None,
        LINES=power_of_two(min(triton.cdiv(split, line), _PREFETCHED_BYTES // (tile["OUT_TILE"] * _LINE_BYTES))),
        LINE=line,
        enable_fp_fusion=False,
        **tile,
        **launch_options(x.device),
    )


def tile_constants(row_tile: int, size: int, itemsize: int) -> dict[str, Any]:
    """How a program with `row_tile` rows is cut; none of it changes the order of a sum."""
    is_wide = row_tile == ROW_TILES[-1]
    chunk = min((64 if is_wide else 128) * 2 // itemsize, power_of_two(size), _SPLIT_UNIT)
    return {
        "OUT_TILE": _WIDE_OUT_TILE if is_wide else _OUT_TILE,
        "CHUNK": max(chunk, 16),
        "STAGES": 4,
        "num_warps": 8 if is_wide else 4,
    }
