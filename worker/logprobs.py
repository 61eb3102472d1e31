"""From what a sampling step leaves of a row's distribution to log-probabilities, in double precision on the host.

A row's numbers, int64: the mass of the whole distribution (worker.mass), then keys (value and id in one, see token_keys)
of the likeliest token, the chosen one, and the likeliest MAX_LOGPROBS in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.mass import UNIT
from worker.request import Logprob


def logprob_of(details: Sequence[int], count: int) -> Logprob:
    """The chosen token's, with the `count` likeliest (fewer if there are not so many tokens)."""
    keys = np.array(details[1:], dtype=np.int64)
    ids, values = (0x7FFFFFFF - (keys & 0x7FFFFFFF)).tolist(), _values(keys >> 32)
    rest = math.log(max(details[0], UNIT) / UNIT)
    found = (values - values[0] - rest).tolist()
    top = [(ids[place], found[place]) for place in range(2, 2 + count) if details[place + 1]]
    return Logprob(ids[1], found[1], tuple(top))


def _values(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    words = ordered.astype(np.int32)
    bits = words ^ ((words >> 31) & 0x7FFFFFFF)
    return bits.astype(np.int32).view(np.float32).astype(np.float64)
