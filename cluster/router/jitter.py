"""How unevenly a replica's reports arrive: how far behind its messages may be."""

from __future__ import annotations

from collections import deque

NUM_GAPS = 8


class Jitter:
    """Reports are sent at equal times, so what differs between two of them was lost on the way, at either end."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)
        self._last_s: float | None = None

    def note(self, now_s: float) -> None:
        """A report has arrived."""
        if self._last_s is not None:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def forget(self) -> None:
        """A new connection begins."""
        self._gaps_s.clear()
        self._last_s = None

    def spread_s(self, now_s: float) -> float:
        """Between the longest and the shortest of the last gaps; one that has not ended yet counts if it is the longest."""
        if not self._gaps_s or self._last_s is None:
            return 0.0
        return max(*self._gaps_s, now_s - self._last_s) - min(self._gaps_s)
