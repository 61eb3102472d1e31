"""Where top-k and top-p cut a row off, exactly: a search among the logits that the histograms have left."""

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
    SCALE,
    TOP_K,
    TOP_P,
    Tables,
    best_key,
    edited,
    greedy_logit,
    key_value,
    line_of,
    logits_from,
    mass_of,
    parts_of,
    real_of,
    seat_of,
    share,
    value_key,
    whole_of,
)
from worker.kernels.sampling_scratch import CAPACITY

_CAPACITY = tl.constexpr(CAPACITY)


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
    tables: Tables,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """(how many logits, what mass) from `key` on, over the whole row."""
    scale = real_of(tables, seat, SCALE)
    number, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        index, live, value = logits_from(line, start, vocab, BLOCK)
        if (needs & EDITS) != 0:
            value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
        is_kept = live & (value_key(value) >= key)
        number += is_kept.to(tl.int32)
        mass += tl.where(is_kept, mass_of((value - likeliest) * scale), 0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _keep_from_row(
    line: tl.tensor,
    likeliest: tl.tensor,
    key: tl.tensor,
    seat: tl.tensor,
    needs: tl.tensor,
    tables: Tables,
    kept: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """What of each block is kept from `key` on."""
    scale, least_p = real_of(tables, seat, SCALE), real_of(tables, seat, LEAST_P)
    for start in range(0, vocab, BLOCK):
        index, live, value = logits_from(line, start, vocab, BLOCK)
        if (needs & EDITS) != 0:
            value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
        exponent = (value - likeliest) * scale
        is_kept = live & (value_key(value) >= key) & (exponent >= least_p)
        tl.store(kept + start // BLOCK, tl.sum(tl.where(is_kept, mass_of(exponent), 0), axis=0))


@triton.jit
def cut(
    tables: Tables,
    best: tl.tensor,
    masses: tl.tensor,
    above: tl.tensor,
    listed: tl.tensor,
    values: tl.tensor,
    owners: tl.tensor,
    kept: tl.tensor,
    cuts: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The smallest key that top-k and top-p keep of a row, by bisection; and what of each block is kept."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        wait_for_previous()
    seat, needs = seat_of(tables, row)
    if (needs & CUT) == 0:
        return
    line = line_of(tables, row, vocab)
    likeliest = greedy_logit(tables, row, line)
    if (needs & EDITS) != 0:
        likeliest = key_value(best_key(best, row, num_blocks, PAD))
    top_k, top_p = whole_of(tables, seat, TOP_K), whole_of(tables, seat, TOP_P)
    size = tl.load(listed + row * 2)
    is_listed = size <= _CAPACITY
    lane = tl.arange(0, _CAPACITY)
    live = (lane < size) & is_listed
    value = tl.load(values + row * _CAPACITY + lane, mask=live, other=float("-inf"))
    keys = tl.where(live, value_key(value), LOWEST_KEY)
    exponent = (value - likeliest) * real_of(tables, seat, SCALE)
    mass = tl.where(live, mass_of(exponent), 0)
    number_above = tl.load(listed + row * 2 + 1)
    base_number = tl.where(is_listed, number_above, 0)
    base_mass = tl.where(is_listed, tl.load(above + row * 2 + 1), 0)
    lowest = tl.where(is_listed, tl.min(tl.where(live, keys, 0x7FFFFFFF), axis=0), LOWEST_KEY).to(tl.int64)
    highest = tl.where(is_listed, tl.max(keys, axis=0), 0x7FFFFFFF).to(tl.int64)
    total = tl.sum(parts_of(masses, row, num_blocks, PAD), axis=0)
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
    if is_listed:
        is_kept = live & (keys >= low) & (exponent >= real_of(tables, seat, LEAST_P))
        owner = tl.load(owners + row * _CAPACITY + lane, mask=is_kept, other=0)
        tl.atomic_add(kept + row * num_blocks + owner, mass, mask=is_kept, sem="relaxed")
    else:
        _keep_from_row(line, likeliest, low, seat, needs, tables, kept + row * num_blocks, vocab, BLOCK)
