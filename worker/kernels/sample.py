"""Sampling as six launches: what a row does not need, its programs skip."""

from __future__ import annotations

from typing import Any

import torch
import triton

from worker.kernels.device import launch_options, power_of_two
from worker.kernels.sampling_cut import CAPACITY, cut, gather, keep
from worker.kernels.sampling_draw import draw
from worker.kernels.sampling_rows import BLOCK
from worker.kernels.sampling_survey import BINS, TOP_LANES, survey, weigh
from worker.sampler import NUM_DETAILS, Sampled
from worker.sampling_table import ALL_NEEDS, Need, SamplingViews


def sample(logits: torch.Tensor, views: SamplingViews, needs: Need = ALL_NEEDS, *, block: int = BLOCK) -> Sampled:
    """worker.sampler.sample; `logits` must be contiguous. The same bits, whatever the rows beside and the `block`."""
    rows, vocab = len(views.places), views.vocab_size
    num_blocks = triton.cdiv(vocab, block)
    scratch = _Scratch(rows, num_blocks, logits.device)
    tables = (
        logits,
        views.places,
        views.whole,
        views.real,
        views.counts,
        views.allowed,
        views.banned,
        views.bias_ids,
        views.bias,
        views.last_tokens,
    )
    # A multiply-add with one rounding instead of two would make masses of other bits than torch does.
    options: dict[str, Any] = {"BLOCK": block, "enable_fp_fusion": False, **launch_options(logits.device)}
    wide, sizes, pad = (rows, num_blocks), (vocab, num_blocks), power_of_two(num_blocks)
    cutting = (scratch.listed, scratch.above)
    if needs & (Need.EDITS | Need.LOGPROBS | Need.CUT):
        own = (scratch.best, scratch.own_mass, scratch.top, scratch.histogram)
        survey[wide](*tables, *own, *cutting, *sizes, num_warps=4, **options)
    if needs & Need.RANDOM:
        weigh[wide](*tables, scratch.best, scratch.masses, scratch.histogram, *sizes, PAD=pad, num_warps=4, **options)
    if needs & Need.CUT:
        found = (*cutting, scratch.num_above, scratch.values)
        shared = (scratch.best, scratch.masses)
        gather[wide](*tables, *shared, scratch.histogram, *found, *sizes, PAD=pad, num_warps=4, **options)
        cut[(rows,)](*tables, *shared, *found, scratch.cuts, *sizes, PAD=pad, num_warps=16, **options)
        keep[wide](*tables, *shared, scratch.cuts, *sizes, PAD=pad, num_warps=4, **options)
    chosen = torch.empty(rows, 2, dtype=torch.int64, device=logits.device)
    details = torch.empty(rows, NUM_DETAILS, dtype=torch.int64, device=logits.device)
    drawn = (scratch.best, scratch.masses, scratch.cuts, scratch.own_mass, scratch.top, chosen, details)
    draw[(rows,)](*tables, *drawn, *sizes, PAD=pad, DETAILS=NUM_DETAILS, num_warps=8, **options)
    return chosen, details


class _Scratch:
    """What one launch leaves to the next; nothing outlives a step."""

    def __init__(self, rows: int, num_blocks: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.best = empty(rows, num_blocks)
        self.masses = empty(rows, num_blocks)
        self.own_mass = empty(rows, num_blocks)
        self.top = empty(rows, num_blocks, TOP_LANES)
        self.histogram = empty(rows, BINS, dtype=torch.int32)
        self.listed = empty(rows, dtype=torch.int32)
        self.num_above = empty(rows, dtype=torch.int32)
        self.above = empty(rows)
        self.values = empty(rows, CAPACITY, dtype=torch.float32)
        self.cuts = empty(rows, dtype=torch.int32)
