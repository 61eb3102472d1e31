"""The two ends of a decode step in vector kernels: tokens to vectors, and greedy keys to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two

_LOWEST = tl.constexpr(-9223372036854775807)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """A decode step's vectors. All are written by `embed_tokens`."""

    x: torch.Tensor
    """[rows, hidden], the residual stream in the model's type."""
    residual: torch.Tensor
    """[rows, hidden], the same in float32."""
    best: torch.Tensor
    """[rows] int64: below every key of a greedy choice."""
    squares: torch.Tensor
    """[1, columns] float32 sums of the squares of `residual`, where `x` is scaled for a norm; else nothing is written."""


@triton.jit
def _embed_tokens(
    token_ids: tl.tensor,
    sources: tl.tensor,
    last_tokens: tl.tensor,
    embedding: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    live = columns < HIDDEN
    if SCALES:
        factor = tl.load(scale + columns, mask=live, other=0.0).to(tl.float32)
    if PDL:
        # In this order: whatever starts from here on starts after the end of the step before.
        wait_for_previous()
        trigger_next()
    source = tl.load(sources + row)
    from_host = tl.load(token_ids + row)
    token = tl.where(source < 0, from_host, tl.load(last_tokens + tl.maximum(source, 0)))
    words = tl.load(embedding + token.to(tl.int64) * HIDDEN + columns, mask=live, other=0.0)
    wide = words.to(tl.float32)
    if SCALES:
        square = tl.sum(wide * wide, axis=0)
        if NORMS:
            factor = factor * tl.rsqrt(square / HIDDEN + eps)
        else:
            tl.store(squares + row, square)
        words = (wide * factor).to(words.dtype)
    tl.store(x + row * HIDDEN + columns, words, mask=live)
    tl.store(residual + row * HIDDEN + columns, wide, mask=live)
    tl.store(best + row, _LOWEST)


def embed_tokens(
    token_ids: torch.Tensor,
    sources: torch.Tensor,
    last_tokens: torch.Tensor,
    embedding: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    columns: int = 0,
    eps: float | None = None,
) -> TokenRows:
    """[rows] int64 each: last_tokens[source], or for a negative source the row's token id, in `embedding`.

    With `scale` [hidden], the weight of the norm that comes next, `x` is multiplied by it, and room for `columns` >= rows
    squares is needed; with `eps` as well, `x` is normed.
    The first kernel of a step: no kernel after it starts before everything before it has ended.
    """
    rows, hidden = len(token_ids), embedding.shape[1]
    made = TokenRows(
        x=embedding.new_empty(rows, hidden),
        residual=embedding.new_empty(rows, hidden, dtype=torch.float32),
        best=token_ids.new_empty(rows),
        squares=embedding.new_empty(1, columns, dtype=torch.float32),
    )
    _embed_tokens[(rows,)](
        token_ids,
        sources,
        last_tokens,
        embedding,
        made.x,
        made.residual,
        made.best,
        embedding if scale is None else scale,
        made.squares,
        0.0 if eps is None else eps,
        HIDDEN=hidden,
        BLOCK=power_of_two(hidden),
        SCALES=scale is not None,
        NORMS=eps is not None,
        num_warps=4,
        **launch_options(embedding.device),
    )
    return made
