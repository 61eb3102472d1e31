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
        self._explained_s: dict[str, float] = {}

    def note(self, incarnation: str) -> None:
        """It crashed; every request that was on it may say so."""
        self._crashed_s.setdefault(incarnation, self._clock())

    def explain(self, incarnations: Collection[str]) -> None:
        """A request was found to have ended these."""
        self._explained_s.update(dict.fromkeys(incarnations, self._clock()))

    def num_others(self, incarnations: Collection[str]) -> int:
        """Crashes beside these that nothing explains: the more, the less does another one prove against a request."""
        limit_s = self._clock() - WINDOW_S
        for times_s in (self._crashed_s, self._explained_s):
            for old in [name for name, time_s in times_s.items() if time_s < limit_s]:
                del times_s[old]
        return len(self._crashed_s.keys() - self._explained_s.keys() - set(incarnations))
