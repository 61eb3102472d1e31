"""What the choice of a row's next token takes beyond the likeliest one."""

from __future__ import annotations

import enum
from typing import NamedTuple

from worker.sampling import SamplingParams
from worker.sequence import Sequence


class Need(enum.IntFlag):
    """What a row's choice takes beyond the likeliest token."""

    RANDOM = 1
    """A draw."""
    CUT = 2
    """A threshold that top-k or top-p set."""
    MIN_P = 4
    PENALTY = 8
    BIAS = 16
    ALLOWED = 32
    """Only some tokens may be chosen."""
    BANNED = 64
    """Some tokens may not be chosen before a number of tokens."""
    LOGPROBS = 128
    EDITS = PENALTY | BIAS | ALLOWED | BANNED
    """Anything that changes logits."""


ALL_NEEDS = Need((1 << 8) - 1)
DRAW_NEEDS = Need.RANDOM | Need.MIN_P
"""What one look at the logits is enough for."""
_BANNED = int(Need.BANNED)


class SampledRow(NamedTuple):
    """A sequence that a step samples for, the row of its logits, the place of its token, and what it needs."""

    sequence: Sequence
    logits: int
    token: int
    needs: int


def row_of(sequence: Sequence, logits: int, token: int) -> SampledRow:
    """The row of a sequence whose next token is chosen from row `logits`."""
    return SampledRow(sequence, logits, token, needs_of(sequence))


def needs_of_all(rows: tuple[SampledRow, ...]) -> Need:
    """What the rows need at most."""
    needs = 0
    for row in rows:
        needs |= row.needs
    return Need(needs)


def needs_of(sequence: Sequence) -> int:
    """What the next token of `sequence` takes, a sum of Needs, with those under way counted as generated.

    Asked for every row of every step: what does not change is found once.
    """
    needs = sequence.sampling_needs
    if needs < 0:
        needs = sequence.sampling_needs = int(_lasting_needs(sequence.request.sampling))
    min_tokens = sequence.request.sampling.min_tokens
    return needs | _BANNED if min_tokens and position_of(sequence) < min_tokens else needs


def _lasting_needs(params: SamplingParams) -> Need:
    needs = Need(0)
    if not params.is_greedy:
        needs |= Need.RANDOM
        needs |= Need.CUT if params.top_k > 0 or params.top_p < 1 else Need(0)
        needs |= Need.MIN_P if params.min_p > 0 else Need(0)
    needs |= Need.PENALTY if params.has_penalties else Need(0)
    needs |= Need.BIAS if params.logit_bias else Need(0)
    needs |= Need.ALLOWED if params.allowed_token_ids else Need(0)
    return needs | (Need.LOGPROBS if params.logprobs is not None else Need(0))


def position_of(sequence: Sequence) -> int:
    """Which of its generated tokens the next step chooses."""
    return sequence.length - sequence.num_prompt
