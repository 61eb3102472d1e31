"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < SIZE
    if PDL:
        wait_for_previous()
    gate = tl.load(gate_up + row * (2 * SIZE) + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * size], contiguous, gates first -> silu(gate) * up [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _silu_mul[(rows, triton.cdiv(size, _BLOCK))](
        gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4, **launch_options(gate_up.device)
    )
    return out
