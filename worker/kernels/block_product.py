"""Matrix times the vectors of some dozens of rows, through shared memory and Hopper's tensor-core groups.

A program owns 64 rows of the matrix, or 64 gates and their ups, and streams them through a ring of stages that the copy
engine fills. The ring is filled with weights before the wait for the kernel before, and with vectors after it. Where there
are too few rows to go round, programs share the inner dimension, and whoever reads the result adds their parts.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.kernels.block_tiles import BLOCK_ROWS, BlockTile, columns_for
from worker.kernels.device import launch_options
from worker.kernels.gluon_pieces import ordered_key, trigger_next, wait_for_previous

_PARTS = gl.constexpr(0)
_GATED = gl.constexpr(1)
_LOGITS = gl.constexpr(2)
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _request(
    weights: gl.tensor,
    first: gl.tensor,
    k: gl.tensor,
    ready: gl.tensor,
    ring: gl.tensor,
    up_ring: gl.tensor,
    pred: gl.tensor,
    UPS: gl.constexpr,
) -> None:
    tma.async_copy_global_to_shared(weights, [first, k], ready, ring, pred)
    if UPS > 0:
        tma.async_copy_global_to_shared(weights, [first + UPS, k], ready, up_ring, pred)


@gluon.jit(do_not_specialize=["rows"])
def _block_product(  # noqa: C901 - its branches are taken when it is compiled
    weights: gl.tensor,
    vectors: gl.tensor,
    bias: gl.tensor,
    out: gl.tensor,
    best: gl.tensor,
    rows: gl.tensor,
    KIND: gl.constexpr,
    SIZE: gl.constexpr,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    BLOCK: gl.constexpr = weights.block_type.shape[0]
    CHUNKS: gl.constexpr = (SIZE + CHUNK - 1) // CHUNK
    SHARE: gl.constexpr = (CHUNKS + PARTS - 1) // PARTS
    UPS: gl.constexpr = OUT if KIND == _GATED else 0
    BYTES: gl.constexpr = (2 if UPS > 0 else 1) * weights.block_type.nbytes + vectors.block_type.nbytes
    first = gl.program_id(0) * BLOCK
    part = gl.program_id(1)
    start = part * SHARE
    count = gl.minimum(CHUNKS - start, SHARE)
    ring = gl.allocate_shared_memory(weights.dtype, [STAGES, BLOCK, CHUNK], weights.layout)
    up_ring = ring
    if UPS > 0:
        up_ring = gl.allocate_shared_memory(weights.dtype, [STAGES, BLOCK, CHUNK], weights.layout)
    vector_ring = gl.allocate_shared_memory(vectors.dtype, [STAGES, COLUMNS, CHUNK], vectors.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(ready.index(s), BYTES, s < count)
        _request(weights, first, (start + s) * CHUNK, ready.index(s), ring.index(s), up_ring.index(s), s < count, UPS)
    if PDL:
        wait_for_previous()
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            vectors, [0, (start + s) * CHUNK], ready.index(s), vector_ring.index(s), s < count
        )

    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    acc = gl.full([BLOCK, COLUMNS], 0.0, gl.float32, PRODUCT)
    up_acc = acc
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        right = vector_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(ring.index(stage), right, acc, is_async=True)
        if UPS > 0:
            up_acc = warpgroup_mma(up_ring.index(stage), right, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(0, deps=(acc, up_acc))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        later = i + STAGES
        more = later < count
        k = (start + later) * CHUNK
        mbarrier.expect(ready.index(stage), BYTES, more)
        _request(weights, first, k, ready.index(stage), ring.index(stage), up_ring.index(stage), more, UPS)
        tma.async_copy_global_to_shared(vectors, [0, k], ready.index(stage), vector_ring.index(stage), more)

    output = first + gl.arange(0, BLOCK, gl.SliceLayout(1, PRODUCT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))
    live = (output < OUT)[:, None] & (column < rows)[None, :]
    place = column[None, :] * OUT + output[:, None]
    if BIAS:
        added = gl.load(bias + output, mask=(output < OUT) & (part == 0), other=0.0).to(gl.float32)
        acc = acc + added[:, None]
    if KIND == _PARTS:
        gl.store(out + part * rows * OUT + place, acc.to(out.dtype.element_ty), mask=live)
    if KIND == _GATED:
        if BIAS:
            up_acc = up_acc + gl.load(bias + OUT + output, mask=output < OUT, other=0.0).to(gl.float32)[:, None]
        gated = acc / (1.0 + gl.exp(-acc)) * up_acc
        gl.store(out + place, gated.to(out.dtype.element_ty), mask=live)
    if KIND == _LOGITS:
        gl.store(out + place, acc, mask=live)
        key = ordered_key(gl.where(live, acc, float("-inf")), output[:, None] + column[None, :] * 0)
        gl.atomic_max(best + column, gl.max(key, axis=0), mask=column < rows, sem="relaxed")


def block_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: BlockTile,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """x [rows, size] and weight [outputs, size] in one half-precision type -> `out` [parts, rows, outputs] float32.

    The product plus `bias` is the sum of the parts.
    """
    assert out.shape == (tile.parts, len(x), len(weight))
    _launch(_PARTS, x, weight, tile, outputs=len(weight), out=out, bias=bias)


def block_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: BlockTile,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """weight [2 * size, hidden], gates first -> `out` [rows, size]: silu(gate) * up, in the type of `x`."""
    assert tile.parts == 1
    _launch(_GATED, x, weight, tile, outputs=len(weight) // 2, out=out, bias=bias)


def block_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: BlockTile,
    *,
    out: torch.Tensor,
    best: torch.Tensor,
) -> None:
    """x [rows, size] -> `out` [rows, outputs] float32; `best` [rows] int64 rises to the key of each greedy choice."""
    assert tile.parts == 1
    _launch(_LOGITS, x, weight, tile, outputs=len(weight), out=out, best=best)


def _launch(
    kind: gl.constexpr,
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: BlockTile,
    *,
    outputs: int,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
) -> None:
    rows = len(x)
    columns = columns_for(rows)
    _block_product[(triton.cdiv(outputs, BLOCK_ROWS), tile.parts)](
        _described(weight, [BLOCK_ROWS, tile.chunk]),
        _described(x, [columns, tile.chunk]),
        weight if bias is None else bias,
        out,
        out if best is None else best,
        rows,
        KIND=kind,
        SIZE=weight.shape[1],
        OUT=outputs,
        COLUMNS=columns,
        CHUNK=tile.chunk,
        STAGES=tile.stages,
        PARTS=tile.parts,
        BIAS=bias is not None,
        num_warps=4,
        **launch_options(weight.device),
    )


def _described(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """For the copy engine; what lies outside of the matrix arrives as zeros."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, block, layout)
