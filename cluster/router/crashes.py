"""Which replicas crashed lately: whether a request is to blame for one, or the times are bad."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

WINDOW_S = 60.0


class Crashes:
    """Remembers each crash for WINDOW_S, by the process that it ended."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashed_s: dict[str, float] = {}
        self._explained: set[str] = set()

    def note(self, incarnation: str) -> None:
        """It crashed; every request that was on it may say so."""
        self._crashed_s.setdefault(incarnation, self._clock())

    def explain(self, incarnation: str) -> None:
        """A request was found to have caused it."""
        self._explained.add(incarnation)

    def num_others(self, incarnations: Collection[str]) -> int:
        """Crashes beside these that nothing explains: the more, the less does another one prove against a request."""
        limit_s = self._clock() - WINDOW_S
        for old in [name for name, crashed_s in self._crashed_s.items() if crashed_s < limit_s]:
            del self._crashed_s[old]
            self._explained.discard(old)
        return len(self._crashed_s.keys() - self._explained - set(incarnations))
