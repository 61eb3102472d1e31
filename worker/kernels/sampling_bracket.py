"""Between which logits the cut of top-k and top-p lies: two histograms bound it, and list the few that are left."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.sampling_rows import (
    CUT,
    FRACTION_ONE,
    LEAST_P,
    MIN_P,
    TOP_K,
    TOP_P,
    Tables,
    line_of,
    logits_from,
    mass_of,
    parts_of,
    real_of,
    seat_of,
    weighed,
    whole_of,
)
from worker.kernels.sampling_scratch import BINS, CAPACITY, FINE_BINS
from worker.kernels.sampling_survey import bin_edge, bin_of, depth_of

_CAPACITY = tl.constexpr(CAPACITY)
_BINS = tl.constexpr(BINS)
_FINE_BINS = tl.constexpr(FINE_BINS)
_ROUNDING = tl.constexpr(1e-5)
"""What the bounds of a bin's mass may be off by, and no less."""
_SLACK = tl.constexpr(4e-5)
"""The same for sums of them."""
_UNIT = tl.constexpr(2.0**-40)
_ONE = tl.constexpr(2.0**-24)


@triton.jit
def _bounds(found: tl.tensor, upper_edge: tl.tensor, lower_edge: tl.tensor) -> tl.tuple:
    """(least, most) mass of so many logits between two depths, in units."""
    number = found.to(tl.float32)
    most = number * tl.exp2(-upper_edge) * (1.0 + _ROUNDING)
    least = number * tl.maximum(tl.exp2(-lower_edge) * (1.0 - _ROUNDING) - _UNIT, 0.0)
    return least, most


@triton.jit
def _between(
    least: tl.tensor,
    most: tl.tensor,
    last: tl.tensor,
    has_k: tl.tensor,
    above: tl.tensor,
    total: tl.tensor,
    top_p: tl.tensor,
    NUM: tl.constexpr,
) -> tl.tuple:
    """(first, last) bin in which the cut can lie. `last` is that of the k-th logit, or the last one with mass.

    `above` is the mass before the first bin, `total` that of the row, both in units.
    """
    bins = tl.arange(0, NUM)
    first = tl.where(has_k, last, NUM)
    if top_p < FRACTION_ONE:
        at_most, at_least = above + tl.cumsum(most, axis=0), above + tl.cumsum(least, axis=0)
        kept_most = tl.where(has_k, above + tl.sum(tl.where(bins <= last, most, 0.0), axis=0), total)
        kept_least = tl.where(has_k, above + tl.sum(tl.where(bins < last, least, 0.0), axis=0), total)
        if NUM == _BINS and not has_k:  # all of the row is in the bins: what they hold below bounds it as well
            rest_least, rest_most = tl.sum(least, axis=0) - at_least, tl.sum(most, axis=0) - at_most
            at_most = tl.minimum(at_most, total - rest_least)
            at_least = tl.maximum(at_least, total - rest_most)
        part, slack = top_p.to(tl.float32) * _ONE, kept_most * _SLACK
        first = tl.minimum(tl.sum((at_most < kept_least * part - slack).to(tl.int32), axis=0), last)
        if not has_k:
            last = tl.minimum(tl.sum((at_least < kept_most * part + slack).to(tl.int32), axis=0), last)
    else:
        last = tl.where(has_k, last, -1)
    return first, last


@triton.jit
def _fine_bin(depth: tl.tensor, begin: tl.tensor, bins_per_factor: tl.tensor) -> tl.tensor:
    """Equal parts of what some coarse bins cover."""
    place = ((depth - begin) * bins_per_factor).to(tl.int32)
    return tl.minimum(tl.maximum(place, 0), _FINE_BINS - 1)


@triton.jit
def refine(
    tables: Tables,
    best: tl.tensor,
    masses: tl.tensor,
    coarse: tl.tensor,
    fine: tl.tensor,
    bracket: tl.tensor,
    span: tl.tensor,
    above: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the coarse bins between which the cut lies, count what is in them once more and finer; the mass above them.

    A k-th token without mass cuts nothing off that could be drawn: top-k then has no say.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat, needs = seat_of(tables, row)
    if (needs & CUT) == 0:
        return
    line = line_of(tables, row, vocab)
    start = block * BLOCK
    index, live, value = logits_from(line, start, vocab, BLOCK)
    total = tl.sum(parts_of(masses, row, num_blocks, PAD), axis=0)
    bins = tl.arange(0, _BINS)
    found = tl.load(coarse + row * _BINS + bins)
    top_k, top_p = whole_of(tables, seat, TOP_K), whole_of(tables, seat, TOP_P)
    least, most = _bounds(found, bin_edge(bins), bin_edge(bins + 1))
    least = tl.where(bins < _BINS - 1, least, 0.0)
    kth = tl.sum((tl.cumsum(found, axis=0) < top_k).to(tl.int32), axis=0)
    has_k = (top_k > 0) & (top_k < vocab) & (kth < _BINS - 1)
    last = tl.where(has_k, kth, _BINS - 2)
    first, last = _between(least, most, last, has_k, 0.0, total.to(tl.float32) * _UNIT, top_p, _BINS)
    begin = bin_edge(first)
    bins_per_factor = _FINE_BINS / (bin_edge(last + 1) - begin)
    if block == 0:
        tl.store(span + row * 2, begin)
        tl.store(span + row * 2 + 1, bins_per_factor)
        tl.store(bracket + row * 4, first)
        tl.store(bracket + row * 4 + 1, last)
        tl.store(bracket + row * 4 + 2, has_k.to(tl.int32))
        tl.store(bracket + row * 4 + 3, tl.sum(tl.where(bins < first, found, 0), axis=0))
    value, exponent = weighed(
        tables, best, row, seat, needs, line, start, index, live, value, vocab, num_blocks, BLOCK, PAD
    )
    depth = depth_of(exponent)
    place = bin_of(depth)
    mass_above = tl.sum(tl.where(live & (place < first), mass_of(exponent), 0), axis=0)
    if mass_above > 0:
        tl.atomic_add(above + row * 2, mass_above, sem="relaxed")
    is_between = live & (place >= first) & (place <= last)
    if tl.max(is_between.to(tl.int32), axis=0) > 0:
        finer = tl.histogram(_fine_bin(depth, begin, bins_per_factor), _FINE_BINS, mask=is_between)
        tl.atomic_add(fine + row * _FINE_BINS + tl.arange(0, _FINE_BINS), finer, mask=finer > 0, sem="relaxed")


@triton.jit
def gather(
    tables: Tables,
    best: tl.tensor,
    masses: tl.tensor,
    fine: tl.tensor,
    bracket: tl.tensor,
    span: tl.tensor,
    above: tl.tensor,
    listed: tl.tensor,
    values: tl.tensor,
    owners: tl.tensor,
    kept: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """List the logits among which the cut lies, and sum up what lies above them."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat, needs = seat_of(tables, row)
    if (needs & CUT) == 0:
        return
    line = line_of(tables, row, vocab)
    start = block * BLOCK
    index, live, value = logits_from(line, start, vocab, BLOCK)
    total = tl.sum(parts_of(masses, row, num_blocks, PAD), axis=0)
    coarse_first, coarse_last = tl.load(bracket + row * 4), tl.load(bracket + row * 4 + 1)
    has_k, num_before = tl.load(bracket + row * 4 + 2) != 0, tl.load(bracket + row * 4 + 3)
    before = tl.load(above + row * 2).to(tl.float32) * _UNIT
    bins = tl.arange(0, _FINE_BINS)
    found = tl.load(fine + row * _FINE_BINS + bins)
    top_k, top_p = whole_of(tables, seat, TOP_K), whole_of(tables, seat, TOP_P)
    # Loaded, not computed again: a logit must fall into the bin in which it was counted.
    begin, bins_per_factor = tl.load(span + row * 2), tl.load(span + row * 2 + 1)
    width = 1.0 / bins_per_factor
    least, most = _bounds(found, begin + bins.to(tl.float32) * width, begin + (bins + 1).to(tl.float32) * width)
    last = tl.sum((num_before + tl.cumsum(found, axis=0) < top_k).to(tl.int32), axis=0)
    last = tl.where(has_k, tl.minimum(last, _FINE_BINS - 1), _FINE_BINS - 1)
    first, last = _between(least, most, last, has_k, before, total.to(tl.float32) * _UNIT, top_p, _FINE_BINS)
    if block == 0:
        number_above = num_before + tl.sum(tl.where(bins < first, found, 0), axis=0)
        tl.store(listed + row * 2 + 1, tl.where(has_k, number_above, -1))
    value, exponent = weighed(
        tables, best, row, seat, needs, line, start, index, live, value, vocab, num_blocks, BLOCK, PAD
    )
    depth = depth_of(exponent)
    place, finer = bin_of(depth), _fine_bin(depth, begin, bins_per_factor)
    is_near = live & (place >= coarse_first) & (place <= coarse_last)
    is_above = (live & (place < coarse_first)) | (is_near & (finer < first))
    mass = tl.where(is_above, mass_of(exponent), 0)
    mass_above = tl.sum(mass, axis=0)
    if mass_above > 0:
        tl.atomic_add(above + row * 2 + 1, mass_above, sem="relaxed")
    if (needs & MIN_P) != 0:
        mass_above = tl.sum(tl.where(exponent >= real_of(tables, seat, LEAST_P), mass, 0), axis=0)
    tl.store(kept + row * num_blocks + block, mass_above)
    is_between = is_near & (finer >= first) & (finer <= last)
    number = tl.sum(is_between.to(tl.int32), axis=0)
    if number > 0:
        slot = tl.atomic_add(listed + row * 2, number, sem="relaxed") + tl.cumsum(is_between.to(tl.int32), axis=0) - 1
        is_room = is_between & (slot < _CAPACITY)
        tl.store(values + row * _CAPACITY + slot, value, mask=is_room)
        tl.store(owners + row * _CAPACITY + slot, tl.full((BLOCK,), 0, tl.int32) + block, mask=is_room)
