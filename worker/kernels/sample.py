"""Sampling as six launches: what a row does not need, its programs skip."""

from __future__ import annotations

from typing import Any

import torch
import triton

from worker.kernels.device import launch_options, power_of_two
from worker.kernels.sampling_bracket import gather, refine
from worker.kernels.sampling_cut import cut
from worker.kernels.sampling_draw import draw
from worker.kernels.sampling_rows import Tables
from worker.kernels.sampling_scratch import BLOCK, scratch_spec
from worker.kernels.sampling_survey import survey, weigh
from worker.sampler import NUM_DETAILS, Sampled
from worker.sampling_needs import ALL_NEEDS, Need
from worker.sampling_views import SamplingViews


def sample(logits: torch.Tensor, views: SamplingViews, needs: Need = ALL_NEEDS, *, block: int = BLOCK) -> Sampled:
    """worker.sampler.sample; `logits` must be contiguous. The same bits, whatever the rows beside and the `block`."""
    rows, vocab = len(views.places), views.vocab_size
    num_blocks = triton.cdiv(vocab, block)
    scratch = {
        name: torch.empty(shape, dtype=dtype, device=logits.device)
        for name, (shape, dtype) in scratch_spec(rows, num_blocks).items()
    }
    tables = Tables(
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
    best, masses, kept = scratch["best"], scratch["masses"], scratch["kept"]
    coarse, fine, above, listed = (scratch[name] for name in ("coarse", "fine", "above", "listed"))
    if needs & (Need.EDITS | Need.LOGPROBS | Need.CUT):
        own = (scratch["own_mass"], scratch["top"])
        survey[wide](tables, best, *own, coarse, fine, above, listed, *sizes, num_warps=4, **options)
    if needs & Need.RANDOM:
        weigh[wide](tables, best, masses, coarse, *sizes, PAD=pad, num_warps=4, **options)
    if needs & Need.CUT:
        bracket, found = (scratch["bracket"], scratch["span"]), (scratch["values"], scratch["owners"], kept)
        refine[wide](tables, best, masses, coarse, fine, *bracket, above, *sizes, PAD=pad, num_warps=4, **options)
        gather[wide](
            tables, best, masses, fine, *bracket, above, listed, *found, *sizes, PAD=pad, num_warps=4, **options
        )
        cut[(rows,)](
            tables, best, masses, above, listed, *found, scratch["cuts"], *sizes, PAD=pad, num_warps=8, **options
        )
    chosen = torch.empty(rows, 2, dtype=torch.int64, device=logits.device)
    details = torch.empty(rows, NUM_DETAILS, dtype=torch.int64, device=logits.device)
    drawn = (best, masses, kept, scratch["cuts"], scratch["own_mass"], scratch["top"], chosen, details)
    width = {"DETAILS": NUM_DETAILS, "DETAIL_LANES": power_of_two(NUM_DETAILS)}
    draw[(rows,)](tables, *drawn, *sizes, PAD=pad, **width, num_warps=8, **options)
    return chosen, details
