"""Root mean square norm of rows, with the residual stream added on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two

_ELEMENTS_A_WARP = 512
_MAX_WARPS = 16


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL and PARTS > 0:
        trigger_next()
    columns = tl.arange(0, BLOCK)
    live = columns < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous()
    values = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        start = part * tl.num_programs(0).to(tl.int64) * HIDDEN
        values += tl.load(x + start + place, mask=live, other=0.0)
    if ADDS:
        values += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=live)
        values = rounded.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    tl.store(out + place, (values * shrink * scale).to(out.dtype.element_ty), mask=live)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, hidden], contiguous -> x normed and scaled by `weight` [hidden], as a new tensor.

    With `residual` [rows, hidden], contiguous: x is added to it in place, and the sum is normed.
    """
    out = torch.empty_like(x)
    _launch(x, weight, eps, residual=residual, out=out, num_parts=0)
    return out


def rms_norm_parts(
    parts: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor, out: torch.Tensor
) -> None:
    """parts [count, rows, hidden] float32: their sum is added to `residual` [rows, hidden], whose norm is `out`."""
    _launch(parts, weight, eps, residual=residual, out=out, num_parts=len(parts))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    num_parts: int,
) -> None:
    rows, hidden = out.shape
    block = power_of_two(hidden)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADDS=residual is not None,
        PARTS=num_parts,
        num_warps=min(max(block // _ELEMENTS_A_WARP, 1), _MAX_WARPS),
        **launch_options(x.device),
    )
