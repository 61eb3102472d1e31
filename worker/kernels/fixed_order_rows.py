"""What happens to each row between two products, one program a row: parts are added in order, then normed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two
from worker.kernels.fixed_order_matmul import SplitSums

_ELEMENTS_A_WARP = 512
_MAX_WARPS = 16


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["token_ids"])
def _norm_rows(
    token_ids: tl.tensor,
    words: tl.tensor,
    parts: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    EMBEDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < HIDDEN
    scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous()
    if EMBEDS:
        values = tl.load(words + tl.load(token_ids + row) * HIDDEN + columns, mask=live, other=0.0).to(tl.float32)
    else:
        values = tl.load(parts + row * HIDDEN + columns, mask=live, other=0.0)
        for split in tl.static_range(1, SPLITS):
            values += tl.load(parts + (row + split * rows) * HIDDEN + columns, mask=live, other=0.0)
        if BIAS:
            values += tl.load(bias + columns, mask=live, other=0.0).to(tl.float32)
        values += tl.load(residual + row * HIDDEN + columns, mask=live, other=0.0)
    tl.store(residual + row * HIDDEN + columns, values, mask=live)
    shrink = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    tl.store(out + row * HIDDEN + columns, (values * shrink * scale).to(out.dtype.element_ty), mask=live)


def embed_norm(
    token_ids: torch.Tensor, words: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids [rows] int64 in `words` [vocab, hidden] -> residual [rows, hidden] float32, and the same normed."""
    residual = torch.empty(len(token_ids), words.shape[1], dtype=torch.float32, device=words.device)
    return residual, _launch(token_ids, words, None, None, residual, weight, eps)


def add_norm(
    sums: SplitSums, bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual [rows, hidden] float32 += the product and its bias; returns it normed, in the type of `weight`."""
    return _launch(None, weight, sums.parts, bias, residual, weight, eps)


def _launch(
    token_ids: torch.Tensor | None,
    words: torch.Tensor,
    parts: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    rows, hidden = residual.shape
    block = power_of_two(hidden)
    out = weight.new_empty(rows, hidden)
    _norm_rows[(rows,)](
        residual if token_ids is None else token_ids,
        words,
        residual if parts is None else parts,
        weight if bias is None else bias,
        residual,
        weight,
        out,
        rows,
        eps,
        SPLITS=1 if parts is None else len(parts),
        HIDDEN=hidden,
        BLOCK=block,
        BIAS=bias is not None,
        EMBEDS=token_ids is not None,
        num_warps=min(max(block // _ELEMENTS_A_WARP, 1), _MAX_WARPS),
        enable_fp_fusion=False,
        **launch_options(weight.device),
    )
    return out
