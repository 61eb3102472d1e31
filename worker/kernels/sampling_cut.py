"""Where top-k and top-p cut a row off: the histogram says between which bins, those few logits say where exactly."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.sampling_rows import (
    CUT,
    EDITS,
    FRACTION_ONE,
    LEAST_P,
    LOWEST_KEY,
    PLACES,
    REAL,
    SCALE,
    SEAT,
    TOKEN,
    TOP_K,
    TOP_P,
    WHOLE,
    best_key,
    edited,
    key_value,
    mass_of,
    share,
    value_key,
)
from worker.kernels.sampling_scratch import BINS, CAPACITY
from worker.kernels.sampling_survey import bin_edge, bin_of

_CAPACITY = tl.constexpr(CAPACITY)
_BINS = tl.constexpr(BINS)
_ROUNDING = tl.constexpr(1e-5)
"""What the bounds of a bin's mass may be off by, and no less."""
_SLACK = tl.constexpr(4e-5)
"""The same for sums of them."""
_UNIT = tl.constexpr(2.0**-40)
_ONE = tl.constexpr(2.0**-24)


@triton.jit
def _between(found: tl.tensor, total: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, vocab: tl.tensor) -> tl.tuple:
    """(first and last bin in which the cut can lie, whether top-k has a say), from the counts of all bins.

    `total` is the mass of the row in units. A k-th token without mass cuts nothing off that could be drawn.
    """
    bins = tl.arange(0, _BINS)
    number = found.to(tl.float32)
    upper = number * tl.exp2(bin_edge(bins)) * (1.0 + _ROUNDING)
    least = tl.exp2(bin_edge(bins + 1)) * (1.0 - _ROUNDING) - _UNIT
    lower = tl.where(bins < _BINS - 1, number * tl.maximum(least, 0.0), 0.0)
    kth = tl.sum((tl.cumsum(found, axis=0) < top_k).to(tl.int32), axis=0)
    has_k = (top_k > 0) & (top_k < vocab) & (kth < _BINS - 1)
    last = tl.where(has_k, kth, _BINS - 2)
    first = tl.where(has_k, kth, 0)
    if top_p < FRACTION_ONE:
        at_most, at_least = tl.cumsum(upper, axis=0), tl.cumsum(lower, axis=0)
        most = tl.where(has_k, tl.sum(tl.where(bins <= last, upper, 0.0), axis=0), total)
        least_mass = tl.where(has_k, tl.sum(tl.where(bins < last, lower, 0.0), axis=0), total)
        if not has_k:
            rest_at_least, rest_at_most = tl.sum(lower, axis=0) - at_least, tl.sum(upper, axis=0) - at_most
            at_most = tl.minimum(at_most, total - rest_at_least)
            at_least = tl.maximum(at_least, total - rest_at_most)
        part, slack = top_p.to(tl.float32) * _ONE, most * _SLACK
        first = tl.minimum(tl.sum((at_most < least_mass * part - slack).to(tl.int32), axis=0), last)
        if not has_k:
            last = tl.minimum(tl.sum((at_least < most * part + slack).to(tl.int32), axis=0), last)
    else:
        last = tl.where(has_k, last, -1)
    return first, last, has_k


@triton.jit
def gather(
    logits: tl.tensor,
    places: tl.tensor,
    whole: tl.tensor,
    real: tl.tensor,
    counts: tl.tensor,
    allowed: tl.tensor,
    banned: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    last_tokens: tl.tensor,
    best: tl.tensor,
    masses: tl.tensor,
    histogram: tl.tensor,
    listed: tl.tensor,
    above: tl.tensor,
    num_above: tl.tensor,
    values: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """List the logits among which the cut lies, and sum up the mass above them; their number, or -1 without top-k."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat = tl.load(places + row * PLACES + SEAT)
    needs = tl.load(whole + seat * WHOLE).to(tl.int32)
    if (needs & CUT) == 0:
        return
    line = logits + tl.load(places + row * PLACES) * vocab
    start = block * BLOCK
    index = start + tl.arange(0, BLOCK)
    live = index < vocab
    value = tl.load(line + index, mask=live, other=float("-inf"))
    lane = tl.arange(0, PAD)
    total = tl.sum(tl.load(masses + row * num_blocks + lane, mask=lane < num_blocks, other=0), axis=0)
    found = tl.load(histogram + row * _BINS + tl.arange(0, _BINS))
    top_k, top_p = tl.load(whole + seat * WHOLE + TOP_K), tl.load(whole + seat * WHOLE + TOP_P)
    first, last, has_k = _between(found, total.to(tl.float32) * _UNIT, top_k, top_p, vocab)
    if block == 0:
        number_above = tl.sum(tl.where(tl.arange(0, _BINS) < first, found, 0), axis=0)
        tl.store(num_above + row, tl.where(has_k, number_above, -1))
    likeliest = tl.load(line + tl.load(last_tokens + tl.load(places + row * PLACES + TOKEN)))
    if (needs & EDITS) != 0:
        likeliest = key_value(best_key(best, row, num_blocks, PAD))
        tables = (whole, real, counts, allowed, banned, bias_ids, bias)
        value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
    exponent = (value - likeliest) * tl.load(real + seat * REAL + SCALE)
    place = bin_of(exponent)
    mass_above = tl.sum(tl.where(live & (place < first), mass_of(exponent), 0), axis=0)
    if mass_above > 0:
        tl.atomic_add(above + row, mass_above, sem="relaxed")
    is_between = live & (place >= first) & (place <= last)
    number = tl.sum(is_between.to(tl.int32), axis=0)
    if number > 0:
        slot = tl.atomic_add(listed + row, number, sem="relaxed") + tl.cumsum(is_between.to(tl.int32), axis=0) - 1
        tl.store(values + row * _CAPACITY + slot, value, mask=is_between & (slot < _CAPACITY))


@triton.jit
def _from_list(keys: tl.tensor, mass: tl.tensor, key: tl.tensor) -> tl.tuple:
    is_kept = keys >= key
    return tl.sum(is_kept.to(tl.int32), axis=0), tl.sum(tl.where(is_kept, mass, 0), axis=0)


@triton.jit
def _from_row(
    line: tl.tensor,
    likeliest: tl.tensor,
    key: tl.tensor,
    seat: tl.tensor,
    needs: tl.tensor,
    tables: tl.tuple,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """(how many logits, what mass) from `key` on, over the whole row."""
    scale = tl.load(tables[1] + seat * REAL + SCALE)
    number, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < vocab
        value = tl.load(line + index, mask=live, other=float("-inf"))
        if (needs & EDITS) != 0:
            value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
        is_kept = live & (value_key(value) >= key)
        number += is_kept.to(tl.int32)
        mass += tl.where(is_kept, mass_of((value - likeliest) * scale), 0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def cut(
    logits: tl.tensor,
    places: tl.tensor,
    whole: tl.tensor,
    real: tl.tensor,
    counts: tl.tensor,
    allowed: tl.tensor,
    banned: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    last_tokens: tl.tensor,
    best: tl.tensor,
    masses: tl.tensor,
    listed: tl.tensor,
    above: tl.tensor,
    num_above: tl.tensor,
    values: tl.tensor,
    cuts: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The smallest key that top-k and top-p keep of a row, by bisection."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        wait_for_previous()
    seat = tl.load(places + row * PLACES + SEAT)
    needs = tl.load(whole + seat * WHOLE).to(tl.int32)
    if (needs & CUT) == 0:
        return
    line = logits + tl.load(places + row * PLACES) * vocab
    likeliest = tl.load(line + tl.load(last_tokens + tl.load(places + row * PLACES + TOKEN)))
    if (needs & EDITS) != 0:
        likeliest = key_value(best_key(best, row, num_blocks, PAD))
    top_k, top_p = tl.load(whole + seat * WHOLE + TOP_K), tl.load(whole + seat * WHOLE + TOP_P)
    tables = (whole, real, counts, allowed, banned, bias_ids, bias)
    size = tl.load(listed + row)
    is_listed = size <= _CAPACITY
    lane = tl.arange(0, _CAPACITY)
    live = (lane < size) & is_listed
    value = tl.load(values + row * _CAPACITY + lane, mask=live, other=float("-inf"))
    keys = tl.where(live, value_key(value), LOWEST_KEY)
    mass = tl.where(live, mass_of((value - likeliest) * tl.load(real + seat * REAL + SCALE)), 0)
    number_above = tl.load(num_above + row)
    base_number = tl.where(is_listed, number_above, 0)
    base_mass = tl.where(is_listed, tl.load(above + row), 0)
    lowest = tl.where(is_listed, tl.min(tl.where(live, keys, 0x7FFFFFFF), axis=0), LOWEST_KEY).to(tl.int64)
    highest = tl.where(is_listed, tl.max(keys, axis=0), 0x7FFFFFFF).to(tl.int64)
    block = tl.arange(0, PAD)
    total = tl.sum(tl.load(masses + row * num_blocks + block, mask=block < num_blocks, other=0), axis=0)
    low = tl.full((), LOWEST_KEY, tl.int64)
    if number_above >= 0:
        low, high = lowest, highest
        while low < high:
            middle = (low + high + 1) >> 1
            number, _ = _from_list(keys, mass, middle)
            if not is_listed:
                number, _ = _from_row(line, likeliest, middle, seat, needs, tables, vocab, BLOCK)
            is_enough = base_number + number >= top_k
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        _, total = _from_list(keys, mass, low)
        if not is_listed:
            _, total = _from_row(line, likeliest, low, seat, needs, tables, vocab, BLOCK)
        total += base_mass
    if top_p < FRACTION_ONE:
        wanted = share(total, top_p, FRACTION_ONE - 1)
        low, high = tl.maximum(low, lowest), highest
        while low < high:
            middle = (low + high + 1) >> 1
            _, reached = _from_list(keys, mass, middle)
            if not is_listed:
                _, reached = _from_row(line, likeliest, middle, seat, needs, tables, vocab, BLOCK)
            is_enough = base_mass + reached >= wanted
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
    tl.store(cuts + row, low.to(tl.int32))


@triton.jit
def keep(
    logits: tl.tensor,
    places: tl.tensor,
    whole: tl.tensor,
    real: tl.tensor,
    counts: tl.tensor,
    allowed: tl.tensor,
    banned: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    last_tokens: tl.tensor,
    best: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of each block of a row with a cut: the mass of what is kept."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat = tl.load(places + row * PLACES + SEAT)
    needs = tl.load(whole + seat * WHOLE).to(tl.int32)
    if (needs & CUT) == 0:
        return
    line = logits + tl.load(places + row * PLACES) * vocab
    start = block * BLOCK
    index = start + tl.arange(0, BLOCK)
    live = index < vocab
    value = tl.load(line + index, mask=live, other=float("-inf"))
    likeliest = tl.load(line + tl.load(last_tokens + tl.load(places + row * PLACES + TOKEN)))
    if (needs & EDITS) != 0:
        likeliest = key_value(best_key(best, row, num_blocks, PAD))
        tables = (whole, real, counts, allowed, banned, bias_ids, bias)
        value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
    exponent = (value - likeliest) * tl.load(real + seat * REAL + SCALE)
    is_kept = live & (value_key(value) >= tl.load(cuts + row))
    is_kept = is_kept & (exponent >= tl.load(real + seat * REAL + LEAST_P))
    tl.store(masses + row * num_blocks + block, tl.sum(tl.where(is_kept, mass_of(exponent), 0), axis=0))
