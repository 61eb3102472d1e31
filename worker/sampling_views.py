"""What a seat of the sampling tables holds, column by column: known to who writes it and to the kernels that read it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

LOG2_E = math.log2(math.e)
MAX_COUNT = (1 << 14) - 1
"""Occurrences of one token that penalties tell apart."""
WORD_BITS = 32
"""Tokens in one word of a mask."""


class Whole(enum.IntEnum):
    """Columns of a seat's int64 numbers."""

    NEEDS = 0
    TOP_K = 1
    TOP_P = 2
    """In units of 2**-24."""
    SEED = 3
    CHOICE = 4
    POSITION = 5
    """Tokens generated so far: the counter of the next random number. A step moves it on."""
    MIN_TOKENS = 6
    NUM_BIAS = 7
    NUM_LOGPROBS = 8


class Real(enum.IntEnum):
    """Columns of a seat's float32 numbers."""

    SCALE = 0
    """From logits to powers of two: log2(e) / temperature."""
    MIN_P = 1
    """log2 of it."""
    REPETITION = 2
    PRESENCE = 3
    FREQUENCY = 4


class Place(enum.IntEnum):
    """Columns of a row's int64 numbers."""

    LOGITS = 0
    """The row of the logits it chooses from."""
    TOKEN = 1
    """Where its greedy token lies in `last_tokens`, and its token goes."""
    SEAT = 2


NUM_WHOLE, NUM_REAL, NUM_PLACES = 16, 8, 3


@dataclass(frozen=True, slots=True)
class SamplingViews:
    """What one sampling step reads and writes, by fixed addresses. Seats are the first dimension of all but `places`."""

    places: torch.Tensor
    """[rows, NUM_PLACES] int64; padding rows sit in the last seat, which needs nothing."""
    whole: torch.Tensor
    """[seats, NUM_WHOLE] int64."""
    real: torch.Tensor
    """[seats, NUM_REAL] float32."""
    counts: torch.Tensor
    """[seats, vocab] int16: twice the occurrences in the answer, plus one for tokens of the prompt. Only penalised
    seats are ever written or read."""
    allowed: torch.Tensor
    """[seats, words] int32, one bit a token."""
    banned: torch.Tensor
    """[seats, words] int32, one bit a token."""
    bias_ids: torch.Tensor
    """[seats, MAX_LOGIT_BIAS] int32, ascending."""
    bias: torch.Tensor
    """[seats, MAX_LOGIT_BIAS] float32."""
    last_tokens: torch.Tensor
    """[places] int64."""

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        return self.counts.shape[1]
