"""What every sampling kernel does with a row: find its seat, edit its logits, turn them into mass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker import mass, sampling_views
from worker.rng import UNIFORM_BITS
from worker.sampling import MAX_LOGIT_BIAS
from worker.sampling_needs import Need
from worker.sampling_views import Place, Real, Whole

RANDOM = tl.constexpr(int(Need.RANDOM))
CUT = tl.constexpr(int(Need.CUT))
MIN_P = tl.constexpr(int(Need.MIN_P))
PENALTY = tl.constexpr(int(Need.PENALTY))
EDITS = tl.constexpr(int(Need.EDITS))
LOGPROBS = tl.constexpr(int(Need.LOGPROBS))
_BIAS = tl.constexpr(int(Need.BIAS))
_ALLOWED = tl.constexpr(int(Need.ALLOWED))
_BANNED = tl.constexpr(int(Need.BANNED))

PLACES = tl.constexpr(sampling_views.NUM_PLACES)
LOGITS = tl.constexpr(int(Place.LOGITS))
TOKEN = tl.constexpr(int(Place.TOKEN))
SEAT = tl.constexpr(int(Place.SEAT))
WHOLE = tl.constexpr(sampling_views.NUM_WHOLE)
NEEDS = tl.constexpr(int(Whole.NEEDS))
TOP_K = tl.constexpr(int(Whole.TOP_K))
TOP_P = tl.constexpr(int(Whole.TOP_P))
SEED = tl.constexpr(int(Whole.SEED))
CHOICE = tl.constexpr(int(Whole.CHOICE))
POSITION = tl.constexpr(int(Whole.POSITION))
NUM_LOGPROBS = tl.constexpr(int(Whole.NUM_LOGPROBS))
_MIN_TOKENS = tl.constexpr(int(Whole.MIN_TOKENS))
_NUM_BIAS = tl.constexpr(int(Whole.NUM_BIAS))
REAL = tl.constexpr(sampling_views.NUM_REAL)
SCALE = tl.constexpr(int(Real.SCALE))
LEAST_P = tl.constexpr(int(Real.MIN_P))
_REPETITION = tl.constexpr(int(Real.REPETITION))
_PRESENCE = tl.constexpr(int(Real.PRESENCE))
_FREQUENCY = tl.constexpr(int(Real.FREQUENCY))

MAX_COUNT = tl.constexpr(sampling_views.MAX_COUNT)
LOG2_E = tl.constexpr(sampling_views.LOG2_E)
FRACTION_BITS = tl.constexpr(UNIFORM_BITS)
FRACTION_ONE = tl.constexpr(mass.FRACTION_ONE)
NO_KEY = tl.constexpr(-9223372036854775807)
"""Below every key of a token."""
LOWEST_KEY = tl.constexpr(-2147483648)
"""No logit's key is below."""
_MAX_BIAS = tl.constexpr(MAX_LOGIT_BIAS)
_BIAS_LANES = tl.constexpr(1 << (MAX_LOGIT_BIAS - 1).bit_length())
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in mass.COEFFICIENTS)
_LEAST_EXPONENT = tl.constexpr(mass.LEAST_EXPONENT)
_MANTISSA_BITS = tl.constexpr(mass.MANTISSA_BITS)
_UNIT_BITS = tl.constexpr(mass.UNIT_BITS)


class Tables(NamedTuple):
    """What every launch reads of the sampled rows; see worker.sampling_views.SamplingViews."""

    logits: torch.Tensor
    places: torch.Tensor
    whole: torch.Tensor
    real: torch.Tensor
    counts: torch.Tensor
    allowed: torch.Tensor
    banned: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor
    last_tokens: torch.Tensor


@triton.jit
def place_of(tables: Tables, row: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """What is known of a row in this step."""
    return tl.load(tables.places + row * PLACES + COLUMN)


@triton.jit
def whole_of(tables: Tables, seat: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """A whole number of a seat."""
    return tl.load(tables.whole + seat * WHOLE + COLUMN)


@triton.jit
def real_of(tables: Tables, seat: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """A real number of a seat."""
    return tl.load(tables.real + seat * REAL + COLUMN)


@triton.jit
def seat_of(tables: Tables, row: tl.tensor) -> tl.tuple:
    """(a row's seat, what it needs)."""
    seat = place_of(tables, row, SEAT)
    return seat, whole_of(tables, seat, NEEDS).to(tl.int32)


@triton.jit
def line_of(tables: Tables, row: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Where a row's logits begin."""
    return tables.logits + place_of(tables, row, LOGITS) * vocab


@triton.jit
def greedy_logit(tables: Tables, row: tl.tensor, line: tl.tensor) -> tl.tensor:
    """The largest of a row's logits, before edits."""
    return tl.load(line + tl.load(tables.last_tokens + place_of(tables, row, TOKEN)))


@triton.jit
def parts_of(parts: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, PAD: tl.constexpr) -> tl.tensor:
    """[PAD]: what each of a row's blocks has left in `parts`, and zeros."""
    block = tl.arange(0, PAD)
    return tl.load(parts + row * num_blocks + block, mask=block < num_blocks, other=0)


@triton.jit
def logits_from(line: tl.tensor, first: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tuple:
    """(tokens, whether there are such, their logits) of a block."""
    index = first + tl.arange(0, BLOCK)
    live = index < vocab
    return index, live, tl.load(line + index, mask=live, other=float("-inf"))


@triton.jit
def mass_of(exponent: tl.tensor) -> tl.tensor:
    """worker.mass.masses. Must be compiled without fused multiply-adds."""
    clamped = tl.maximum(exponent, _LEAST_EXPONENT)
    whole = tl.floor(clamped)
    rest = clamped - whole
    power = rest * _C0 + _C1
    power = power * rest + _C2
    power = power * rest + _C3
    power = power * rest + _C4
    power = power * rest + _C5
    # A power of two more in the exponent, and what is left of the point cut off: exact.
    raised = power.to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + _UNIT_BITS) << _MANTISSA_BITS)
    return raised.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def share(total: tl.tensor, fraction: tl.tensor, EXTRA: tl.constexpr) -> tl.tensor:
    """worker.mass.share with EXTRA = 0, share_up with EXTRA = FRACTION_ONE - 1."""
    high, low = total >> FRACTION_BITS, total & (FRACTION_ONE - 1)
    return high * fraction + ((low * fraction + EXTRA) >> FRACTION_BITS)


@triton.jit
def value_key(value: tl.tensor) -> tl.tensor:
    """worker.mass.ordered_keys."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key: tl.tensor) -> tl.tensor:
    """The value in a token's key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_key(best: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, PAD: tl.constexpr) -> tl.tensor:
    """The largest of a row's [blocks] keys."""
    block = tl.arange(0, PAD)
    return tl.max(tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=NO_KEY), axis=0)


@triton.jit
def edited(
    value: tl.tensor,
    index: tl.tensor,
    live: tl.tensor,
    first: tl.tensor,
    seat: tl.tensor,
    needs: tl.tensor,
    tables: Tables,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The logits of tokens `index`, from `first` on, as worker.sampler edits them."""
    if needs & PENALTY:
        count = tl.load(tables.counts + seat * vocab + index, mask=live, other=0).to(tl.int32)
        factor = real_of(tables, seat, _REPETITION)
        repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = tl.where(count != 0, repeated, value)
        times = count >> 1
        penalty = real_of(tables, seat, _PRESENCE)
        penalty += real_of(tables, seat, _FREQUENCY) * times.to(tl.float32)
        value = tl.where(times > 0, value - penalty, value)
    if needs & _BIAS:
        lane = tl.arange(0, _BIAS_LANES)
        num_bias = whole_of(tables, seat, _NUM_BIAS)
        ids = tl.load(tables.bias_ids + seat * _MAX_BIAS + lane, mask=lane < num_bias, other=0x7FFFFFFF)
        begin = tl.sum((ids < first).to(tl.int32), axis=0)
        end = tl.sum((ids < first + BLOCK).to(tl.int32), axis=0)
        for number in range(begin, end):
            added = tl.load(tables.bias + seat * _MAX_BIAS + number)
            value = tl.where(index == tl.load(tables.bias_ids + seat * _MAX_BIAS + number), value + added, value)
    words = (vocab + 31) // 32
    if needs & _ALLOWED:
        word = tl.load(tables.allowed + seat * words + (index >> 5), mask=live, other=0)
        value = tl.where(((word >> (index & 31)) & 1) != 0, value, float("-inf"))
    if needs & _BANNED:
        position = whole_of(tables, seat, POSITION)
        if position < whole_of(tables, seat, _MIN_TOKENS):
            word = tl.load(tables.banned + seat * words + (index >> 5), mask=live, other=0)
            value = tl.where(((word >> (index & 31)) & 1) != 0, float("-inf"), value)
    return value


@triton.jit
def weighed(
    tables: Tables,
    best: tl.tensor,
    row: tl.tensor,
    seat: tl.tensor,
    needs: tl.tensor,
    line: tl.tensor,
    first: tl.tensor,
    index: tl.tensor,
    live: tl.tensor,
    value: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
) -> tl.tuple:
    """(edited logits, exponents of their masses) of a block, from what `logits_from` has found."""
    likeliest = greedy_logit(tables, row, line)
    if (needs & EDITS) != 0:
        likeliest = key_value(best_key(best, row, num_blocks, PAD))
        value = edited(value, index, live, first, seat, needs, tables, vocab, BLOCK)
    return value, (value - likeliest) * real_of(tables, seat, SCALE)
