"""The token of every sampled row, and what it changes for the next step."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.dependent_launch import wait_for_previous
from worker.kernels.greedy import ordered_key
from worker.kernels.sampling_rows import (
    CHOICE,
    CUT,
    EDITS,
    FRACTION_BITS,
    LEAST_P,
    LOGPROBS,
    LOWEST_KEY,
    MAX_COUNT,
    NO_KEY,
    NUM_LOGPROBS,
    PENALTY,
    POSITION,
    RANDOM,
    SCALE,
    SEED,
    TOKEN,
    WHOLE,
    Tables,
    best_key,
    edited,
    key_value,
    line_of,
    logits_from,
    mass_of,
    parts_of,
    place_of,
    real_of,
    seat_of,
    share,
    value_key,
    whole_of,
)
from worker.kernels.sampling_scratch import TOP_LANES

_TOP_LANES = tl.constexpr(TOP_LANES)


@triton.jit
def _details(
    line: tl.tensor,
    greedy: tl.tensor,
    token: tl.tensor,
    row: tl.tensor,
    num_wanted: tl.tensor,
    own_mass: tl.tensor,
    top: tl.tensor,
    details: tl.tensor,
    num_blocks: tl.tensor,
    PAD: tl.constexpr,
    DETAILS: tl.constexpr,
) -> None:
    """See worker.logprobs. Only the first `num_wanted` of the likeliest tokens are written."""
    mass = parts_of(own_mass, row, num_blocks, PAD)
    out = details + row * DETAILS
    tl.store(out, tl.sum(mass, axis=0))
    tl.store(out + 1, ordered_key(tl.load(line + greedy), greedy.to(tl.int32)))
    tl.store(out + 2, ordered_key(tl.load(line + token), token.to(tl.int32)))
    lane = tl.arange(0, PAD * _TOP_LANES)
    is_set = (lane < num_blocks * _TOP_LANES) & (lane % _TOP_LANES < num_wanted)
    keys = tl.load(top + row * num_blocks * _TOP_LANES + lane, mask=is_set, other=NO_KEY)
    for number in range(num_wanted):
        key = tl.max(keys, axis=0)
        tl.store(out + 3 + number, tl.where(key == NO_KEY, 0, key))
        keys = tl.where(keys == key, NO_KEY, keys)


@triton.jit
def draw(
    tables: Tables,
    best: tl.tensor,
    masses: tl.tensor,
    kept: tl.tensor,
    cuts: tl.tensor,
    own_mass: tl.tensor,
    top: tl.tensor,
    chosen: tl.tensor,
    details: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    DETAILS: tl.constexpr,
    DETAIL_LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Inverts the cumulative mass in id order at a random number; or takes the best."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        wait_for_previous()
    place = place_of(tables, row, TOKEN)
    seat, needs = seat_of(tables, row)
    line = line_of(tables, row, vocab)
    greedy = tl.load(tables.last_tokens + place)
    own_best = tl.load(line + greedy)
    token, likeliest = greedy, own_best
    if (needs & EDITS) != 0:
        key = best_key(best, row, num_blocks, PAD)
        token, likeliest = 0x7FFFFFFF - (key & 0x7FFFFFFF), key_value(key)
    position = whole_of(tables, seat, POSITION)
    if (needs & RANDOM) != 0:
        seed = whole_of(tables, seat, SEED)
        choice = whole_of(tables, seat, CHOICE).to(tl.int32)
        word, _, _, _ = tl.philox(seed, position.to(tl.int32), choice, 0, 0)
        fraction = (word >> (32 - FRACTION_BITS)).to(tl.int64)
        block = tl.arange(0, PAD)
        parts = masses
        if (needs & CUT) != 0:
            parts = kept
        mass = parts_of(parts, row, num_blocks, PAD)
        target = share(tl.sum(mass, axis=0), fraction, 0)
        is_before = (tl.cumsum(mass, axis=0) <= target) & (block < num_blocks)
        start = tl.minimum(tl.sum(is_before.to(tl.int32), axis=0), num_blocks - 1) * BLOCK
        before = tl.sum(tl.where(is_before, mass, 0), axis=0)
        index, live, value = logits_from(line, start, vocab, BLOCK)
        if (needs & EDITS) != 0:
            value = edited(value, index, live, start, seat, needs, tables, vocab, BLOCK)
        exponent = (value - likeliest) * real_of(tables, seat, SCALE)
        least = tl.full((), LOWEST_KEY, tl.int32)
        if (needs & CUT) != 0:
            least = tl.load(cuts + row)
        is_kept = live & (value_key(value) >= least) & (exponent >= real_of(tables, seat, LEAST_P))
        reached = before + tl.cumsum(tl.where(is_kept, mass_of(exponent), 0), axis=0)
        token = (start + tl.sum((reached <= target).to(tl.int32), axis=0)).to(tl.int64)
        token = tl.minimum(token, vocab - 1)
    is_finite = (tl.abs(own_best) < float("inf")) & (tl.abs(likeliest) < float("inf"))
    token = tl.where(is_finite, token, greedy)
    tl.store(chosen + row * 2, token)
    tl.store(chosen + row * 2 + 1, is_finite.to(tl.int64))
    if needs != 0:
        tl.store(tables.last_tokens + place, token)
        tl.store(tables.whole + seat * WHOLE + POSITION, position + 1)
    if (needs & PENALTY) != 0:
        cell = tables.counts + seat * vocab + token
        count = tl.load(cell).to(tl.int32)
        tl.store(cell, (count + tl.where((count >> 1) < MAX_COUNT, 2, 0)).to(tl.int16))
    written = 0
    if (needs & LOGPROBS) != 0:
        wanted = whole_of(tables, seat, NUM_LOGPROBS).to(tl.int32)
        written = 3 + wanted
        _details(line, greedy, token, row, wanted, own_mass, top, details, num_blocks, PAD, DETAILS)
    lane = tl.arange(0, DETAIL_LANES)
    tl.store(
        details + row * DETAILS + lane, tl.zeros((DETAIL_LANES,), tl.int64), mask=(lane >= written) & (lane < DETAILS)
    )
