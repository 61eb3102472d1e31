"""Whether requests are placed on a replica: a state machine without a clock of its own."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

JITTER = 0.2
WINDOW_S = 10.0
MIN_OUTCOMES = 5
"""Answers in the window before their share of failures means anything."""
FAILURE_SHARE = 0.5
FAILURES_IN_A_ROW = 5
"""Open it at any pace, also when the window never fills."""
LOSS_WINDOW_S = 30.0
"""Two losses of the connection within this make a pause; a single one only a canary."""
FORGIVEN_AFTER_S = 60.0
"""Closed for this long, the next pause is the shortest again."""


class BreakerState(enum.Enum):
    """HALF_OPEN at first, with each new connection, and after each pause; see `Breaker`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Tick:
    """Outcomes of one second."""

    second: int
    good: int = 0
    bad: int = 0


class Breaker:
    """CLOSED: requests are placed. OPEN: none until a pause is over. HALF_OPEN: a canary decides.

    Only three things count against a replica: answers that end INTERNAL, connections that end unasked, and work
    without progress. Whoever calls it sees to that; the mistakes and cancellations of clients and refusals for lack of
    room are not told to it at all. The share of bad answers opens it only while `may_open` says that another replica
    can take over: one bad client must not close the last door. Pauses double from `pause_min_s` to `pause_max_s`, with
    jitter so that routers do not come back together.
    """

    def __init__(
        self,
        *,
        pause_min_s: float,
        pause_max_s: float,
        may_open: Callable[[], bool],
        clock: Callable[[], float],
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self._pause_min_s = pause_min_s
        self._pause_max_s = pause_max_s
        self._may_open = may_open
        self._clock = clock
        self._jitter = jitter or (lambda: random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311
        self._state = BreakerState.HALF_OPEN
        self._ticks: deque[_Tick] = deque()
        self._num_in_a_row = 0
        self._num_pauses = 0
        self._open_until_s = 0.0
        self._closed_at_s = clock()
        self._lost_at_s: float | None = None
        self.num_trips = 0
        """How often it went from CLOSED to OPEN."""

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether requests may be placed."""
        return self._state is BreakerState.CLOSED

    @property
    def pause_left_s(self) -> float:
        """Until a canary may be tried; 0 unless OPEN."""
        return max(0.0, self._open_until_s - self._clock()) if self._state is BreakerState.OPEN else 0.0

    def succeeded(self) -> None:
        """An answer ended well."""
        if self.is_closed:
            self._num_in_a_row = 0
            self._tick().good += 1

    def failed(self) -> None:
        """An answer ended INTERNAL."""
        if not self.is_closed:
            return
        self._num_in_a_row += 1
        self._tick().bad += 1
        if (self._num_in_a_row >= FAILURES_IN_A_ROW or self._has_bad_window()) and self._may_open():
            self._open()

    def stalled(self) -> None:
        """It has work and makes no progress."""
        if self._state is not BreakerState.OPEN:
            self._open()

    def lost(self) -> None:
        """Its connection ended, and nobody had asked for that."""
        now_s, before_s = self._clock(), self._lost_at_s
        self._lost_at_s = now_s
        if before_s is not None and now_s - before_s < LOSS_WINDOW_S:
            self._open()
        elif self._state is BreakerState.CLOSED:
            self._state = BreakerState.HALF_OPEN

    def reconnecting(self) -> None:
        """Its connection ended as it should: nothing is held against it, but a canary is due."""
        if self._state is BreakerState.CLOSED:
            self._state = BreakerState.HALF_OPEN

    def hold(self) -> None:
        """Place nothing there until `probing`, for a reason that is not its own."""
        self._state = BreakerState.OPEN

    def probing(self) -> None:
        """The pause is over and a canary is on its way."""
        self._state = BreakerState.HALF_OPEN

    def passed(self) -> None:
        """The canary came back."""
        self._state = BreakerState.CLOSED
        self._closed_at_s = self._clock()
        self._num_in_a_row = 0
        self._ticks.clear()

    def refused(self) -> None:
        """The canary did not come back, or not as it should."""
        self._open()

    def _open(self) -> None:
        now_s = self._clock()
        if self._state is BreakerState.CLOSED:
            self.num_trips += 1
            if now_s - self._closed_at_s >= FORGIVEN_AFTER_S:
                self._num_pauses = 0
        pause_s = min(self._pause_min_s * 2.0 ** min(self._num_pauses, 32), self._pause_max_s)
        self._num_pauses += 1
        self._open_until_s = now_s + pause_s * self._jitter()
        self._state = BreakerState.OPEN

    def _tick(self) -> _Tick:
        second = int(self._clock())
        if not self._ticks or self._ticks[-1].second != second:
            self._ticks.append(_Tick(second))
        return self._ticks[-1]

    def _has_bad_window(self) -> bool:
        oldest = self._clock() - WINDOW_S
        while self._ticks and self._ticks[0].second < oldest:
            self._ticks.popleft()
        bad = sum(tick.bad for tick in self._ticks)
        total = bad + sum(tick.good for tick in self._ticks)
        return total >= MIN_OUTCOMES and bad >= FAILURE_SHARE * total
