"""The greedy choice of every row: the largest logit, ties to the lowest id; and the state that decode rows live in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.device import launch_options, power_of_two

if TYPE_CHECKING:
    from worker.decode_inputs import DecodeViews

_BLOCK = 4096


@triton.jit
def ordered_key(value: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64 keys in the order of the choice: NaN above all, then the larger value, then the lower index."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # no minus zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(value == value, ordered, 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _block_best(
    logits: tl.tensor,
    wide: tl.tensor,
    best: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    live = index < vocab
    if PDL:
        wait_for_previous()
    value = tl.load(logits + row * vocab + index, mask=live, other=float("-inf")).to(tl.float32)
    tl.store(wide + row * vocab + index, value, mask=live)
    # Tokens past the end have the highest ids, so that they lose even against minus infinity.
    tl.store(best + row * num_blocks + block, tl.max(ordered_key(value, index), axis=0))


@triton.jit
def _row_best(
    best: tl.tensor,
    wide: tl.tensor,
    chosen: tl.tensor,
    last_tokens: tl.tensor,
    positions: tl.tensor,
    live: tl.tensor,
    sources: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    PAD: tl.constexpr,
    ADVANCES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PAD)
    if PDL:
        wait_for_previous()
    lowest = -9223372036854775807
    key = tl.max(tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=lowest), axis=0)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    value = tl.load(wide + row * vocab + token)
    tl.store(chosen + row * 2, token)
    tl.store(chosen + row * 2 + 1, (tl.abs(value) < float("inf")).to(tl.int64))
    if ADVANCES:
        tl.store(last_tokens + row, token)
        tl.store(positions + row, tl.load(positions + row) + tl.load(live + row))
        tl.store(sources + row, row)


@triton.jit
def _pick_tokens(
    token_ids: tl.tensor, sources: tl.tensor, last_tokens: tl.tensor, out: tl.tensor, PDL: tl.constexpr
) -> None:
    row = tl.program_id(0)
    if PDL:
        wait_for_previous()
    source = tl.load(sources + row)
    from_host = tl.load(token_ids + row)
    tl.store(out + row, tl.where(source < 0, from_host, tl.load(last_tokens + tl.maximum(source, 0))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowState:
    """What a decode step leaves to the next over the same rows. All are int64, changed in place."""

    last_tokens: torch.Tensor
    """[at least rows]: becomes the chosen tokens."""
    positions: torch.Tensor
    """[rows]: moves on by `live`."""
    live: torch.Tensor
    """[rows]: 1, or 0 for padding."""
    sources: torch.Tensor
    """[rows]: becomes each row's own number; a negative source stands for the token in `token_ids`."""

    @classmethod
    def of(cls, inputs: DecodeViews) -> RowState:
        """What the choice of tokens moves on in these inputs."""
        return cls(last_tokens=inputs.last_tokens, positions=inputs.positions, live=inputs.live, sources=inputs.sources)


def greedy(
    logits: torch.Tensor, state: RowState | None = None, wide: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] in any float type, contiguous -> the same in float32, in `wide` if given; and [rows, 2] int64.

    The pair is the token, and 1 where the largest logit is finite; a row with a NaN counts as not finite. With `state`,
    the rows are moved on to the chosen tokens.
    """
    rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, _BLOCK)
    if wide is None:
        wide = torch.empty_like(logits, dtype=torch.float32)
    best = torch.empty(rows, num_blocks, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    _block_best[(rows, num_blocks)](logits, wide, best, vocab, num_blocks, BLOCK=_BLOCK, num_warps=4, **options)
    return wide, choose_best(best, wide, state)


def choose_best(best: torch.Tensor, wide: torch.Tensor, state: RowState | None = None) -> torch.Tensor:
    """best [rows, blocks] int64, the keys of the greedy choices of blocks of logits -> as the second of `greedy`."""
    rows, num_blocks = best.shape
    chosen = torch.empty(rows, 2, dtype=torch.int64, device=wide.device)
    _row_best[(rows,)](
        best,
        wide,
        chosen,
        *((chosen,) * 4 if state is None else (state.last_tokens, state.positions, state.live, state.sources)),
        wide.shape[1],
        num_blocks,
        PAD=power_of_two(num_blocks),
        ADVANCES=state is not None,
        num_warps=1,
        **launch_options(wide.device),
    )
    return chosen


def pick_tokens(token_ids: torch.Tensor, sources: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """[rows] int64 each -> last_tokens[source], or for a negative source the row's token id."""
    out = torch.empty_like(token_ids)
    _pick_tokens[(len(token_ids),)](
        token_ids, sources, last_tokens, out, num_warps=1, **launch_options(token_ids.device)
    )
    return out
