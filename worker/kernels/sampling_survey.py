"""The first looks at a sampled row, a block of logits a program: its best after edits, its own distribution, its mass."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.greedy import ordered_key
from worker.kernels.sampling_rows import (
    CUT,
    EDITS,
    LEAST_P,
    LOG2_E,
    LOGPROBS,
    MIN_P,
    NO_KEY,
    NUM_LOGPROBS,
    RANDOM,
    Tables,
    edited,
    greedy_logit,
    line_of,
    logits_from,
    mass_of,
    real_of,
    seat_of,
    weighed,
    whole_of,
)
from worker.kernels.sampling_scratch import BINS, FINE_BINS, TOP_LANES

_TOP_LANES = tl.constexpr(TOP_LANES)
_BINS = tl.constexpr(BINS)
_FINE_BINS = tl.constexpr(FINE_BINS)
_NEAR = tl.constexpr(12.0)
"""Down to here, in factors of two, bins are narrow: that is where cuts through many likely tokens lie."""
_PER_NEAR = tl.constexpr(6.0)
"""Bins to a factor of two above it."""
_NUM_NEAR = tl.constexpr(72)
_PER_FAR = tl.constexpr(1.95)
"""The same below it."""


@triton.jit
def depth_of(exponent: tl.tensor) -> tl.tensor:
    """Factors of two below the likeliest token."""
    return -tl.maximum(exponent, -63.0)


@triton.jit
def bin_of(depth: tl.tensor) -> tl.tensor:
    """Never falls as the logit falls."""
    place = tl.where(depth < _NEAR, depth * _PER_NEAR, (depth - _NEAR) * _PER_FAR + _NUM_NEAR)
    return tl.minimum(place.to(tl.int32), _BINS - 1)


@triton.jit
def bin_edge(number: tl.tensor) -> tl.tensor:
    """The depth at which a bin begins."""
    place = number.to(tl.float32)
    return tl.where(place < _NUM_NEAR, place / _PER_NEAR, (place - _NUM_NEAR) / _PER_FAR + _NEAR)


@triton.jit
def survey(
    tables: Tables,
    best: tl.tensor,
    own_mass: tl.tensor,
    top: tl.tensor,
    coarse: tl.tensor,
    fine: tl.tensor,
    above: tl.tensor,
    listed: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of each block: the best key after edits; the mass and the likeliest tokens before them. Empties the histograms."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat, needs = seat_of(tables, row)
    if (needs & CUT) != 0 and block == 0:
        tl.store(coarse + row * _BINS + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int32))
        tl.store(fine + row * _FINE_BINS + tl.arange(0, _FINE_BINS), tl.zeros((_FINE_BINS,), tl.int32))
        tl.store(above + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
        tl.store(listed + row * 2, 0)
    if (needs & (EDITS | LOGPROBS)) == 0:
        return
    line = line_of(tables, row, vocab)
    first = block * BLOCK
    index, live, value = logits_from(line, first, vocab, BLOCK)
    if (needs & LOGPROBS) != 0:
        likeliest = greedy_logit(tables, row, line)
        mass = tl.where(live, mass_of((value - likeliest) * LOG2_E), 0)
        tl.store(own_mass + row * num_blocks + block, tl.sum(mass, axis=0))
        keys = tl.where(live, ordered_key(value, index), NO_KEY)
        places_of_top = top + (row * num_blocks + block) * _TOP_LANES
        for number in range(whole_of(tables, seat, NUM_LOGPROBS).to(tl.int32)):
            key = tl.max(keys, axis=0)
            tl.store(places_of_top + number, key)
            keys = tl.where(keys == key, NO_KEY, keys)
    if (needs & EDITS) != 0:
        value = edited(value, index, live, first, seat, needs, tables, vocab, BLOCK)
        key = tl.where(live, ordered_key(value, index), NO_KEY)
        tl.store(best + row * num_blocks + block, tl.max(key, axis=0))


@triton.jit
def weigh(
    tables: Tables,
    best: tl.tensor,
    masses: tl.tensor,
    coarse: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of each block of a row that draws: its mass, and for rows with a cut how many logits lie where."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        wait_for_previous()
    seat, needs = seat_of(tables, row)
    if (needs & RANDOM) == 0:
        return
    line = line_of(tables, row, vocab)
    first = block * BLOCK
    index, live, value = logits_from(line, first, vocab, BLOCK)
    value, exponent = weighed(
        tables, best, row, seat, needs, line, first, index, live, value, vocab, num_blocks, BLOCK, PAD
    )
    mass = tl.where(live, mass_of(exponent), 0)
    if (needs & CUT) != 0:
        found = tl.histogram(bin_of(depth_of(exponent)), _BINS, mask=live)
        tl.atomic_add(coarse + row * _BINS + tl.arange(0, _BINS), found, mask=found > 0, sem="relaxed")
    elif (needs & MIN_P) != 0:
        mass = tl.where(exponent >= real_of(tables, seat, LEAST_P), mass, 0)
    tl.store(masses + row * num_blocks + block, tl.sum(mass, axis=0))
