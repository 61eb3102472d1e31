"""Root mean square norm of rows, with the residual stream added on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
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
    PDL: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    live = columns < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous()
    values = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
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
    rows, hidden = x.shape
    block = power_of_two(hidden)
    out = torch.empty_like(x)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=min(max(block // _ELEMENTS_A_WARP, 1), _MAX_WARPS),
        **launch_options(x.device),
    )
    return out
