"""Retries as a share of the requests there are: when everything fails, trying again only adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable

RATIO = 0.1
FLOOR_PER_S = 1.0
MAX_RETRIES = 100.0


class RetryBudget:
    """A token bucket: a request brings `ratio` of a retry, time a few more, and at most `max_retries` are saved up.

    The floor lets a quiet client try again at all. Not for several threads.
    """

    def __init__(
        self,
        *,
        ratio: float = RATIO,
        floor_per_s: float = FLOOR_PER_S,
        max_retries: float = MAX_RETRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ratio = ratio
        self._floor_per_s = floor_per_s
        self._max_retries = max_retries
        self._clock = clock
        self._left = min(floor_per_s, max_retries)
        self._filled_s = clock()

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        return self._left

    def request(self) -> None:
        """Somebody asks for something, for the first time."""
        self._left = min(self._left + self._ratio, self._max_retries)

    def try_again(self) -> bool:
        """Whether there may be a retry now; it is taken from the budget."""
        now_s = self._clock()
        # Time alone saves up no more than one second's worth.
        floor = min(self._floor_per_s * (now_s - self._filled_s), self._floor_per_s)
        self._filled_s = now_s
        self._left = max(self._left, min(self._left + floor, self._floor_per_s))
        if self._left < 1:
            return False
        self._left -= 1
        return True
