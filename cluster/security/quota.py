"""How much of a pool one tenant may take: tokens a second, and requests at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.errors import QuotaExceeded

SLOT_RETRY_S = 0.25
"""When to ask again for a slot: nobody knows when the next answer ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant."""

    tokens_per_s: float = math.inf
    """Tokens of prompts and answers, in the long run."""
    burst_tokens: float = 0.0
    """As many at once after a rest; 0 = those of ten seconds."""
    max_streams: int = 0
    """Requests answered at the same time; 0 = as many as the server takes."""

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise ValueError(f"tokens_per_s {self.tokens_per_s} is not a positive number")
        if not 0 <= self.burst_tokens < math.inf:
            raise ValueError(f"burst_tokens {self.burst_tokens} is negative or not a number")
        if self.max_streams < 0:
            raise ValueError(f"max_streams {self.max_streams} is negative")

    @property
    def burst(self) -> float:
        """The bucket's size."""
        return self.burst_tokens or 10 * self.tokens_per_s

    def part_of(self, num_sharing: int) -> Quota:
        """What each of so many servers gives out; of streams at the same time a whole number, rounded up."""
        if num_sharing <= 1:
            return self
        return replace(
            self,
            tokens_per_s=self.tokens_per_s / num_sharing,
            burst_tokens=self.burst_tokens / num_sharing,
            max_streams=math.ceil(self.max_streams / num_sharing),
        )


class TokenBucket:
    """Fills at `rate` up to `burst`. Costs are guesses when they are taken and are put right later: it may go under 0."""

    def __init__(self, rate: float, burst: float, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """Tokens there are now; negative = owed."""
        self._fill()
        return self._level

    def take(self, cost: float) -> float:
        """0 when the tokens were there and are taken; else the seconds until they will be, and none are.

        What costs more than the bucket holds needs a full one.
        """
        if self._rate == math.inf:
            return 0.0
        missing = min(cost, self._burst) - self.level
        if missing > 0:
            return missing / self._rate
        self._level -= cost
        return 0.0

    def give(self, amount: float) -> None:
        """Put tokens back; a negative amount takes more."""
        if self._rate < math.inf:
            self._level = min(self._burst, self.level + amount)

    def resize(self, rate: float, burst: float) -> None:
        """Go on with other limits."""
        self._fill()
        if self._rate == math.inf:
            self._level = burst
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def _fill(self) -> None:
        now_s = self._clock()
        if self._rate < math.inf:
            self._level = min(self._burst, self._level + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s


class Account:
    """What one tenant is using."""

    def __init__(self, tenant: str, quota: Quota, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self._quota = quota
        self._bucket = TokenBucket(quota.tokens_per_s, quota.burst, clock=clock)
        self._num_streams = 0

    @property
    def num_streams(self) -> int:
        """Requests being answered or waiting for their turn."""
        return self._num_streams

    @property
    def level(self) -> float:
        """Tokens it could spend now."""
        return self._bucket.level

    def change(self, quota: Quota) -> None:
        """Other limits from now on."""
        if quota != self._quota:
            self._quota = quota
            self._bucket.resize(quota.tokens_per_s, quota.burst)

    def open(self, cost: float) -> None:
        """Begin a request of about `cost` tokens. Raises QuotaExceeded, and then nothing was taken."""
        limit = self._quota.max_streams
        if limit and self._num_streams >= limit:
            raise QuotaExceeded(f"{limit} requests at the same time", SLOT_RETRY_S)
        wait_s = self._bucket.take(cost)
        if wait_s > 0:
            raise QuotaExceeded(f"{self._quota.tokens_per_s:g} tokens a second", wait_s)
        self._num_streams += 1

    def close(self, cost: float, used: float) -> None:
        """It has ended after `used` tokens."""
        self._num_streams -= 1
        self._bucket.give(cost - used)
