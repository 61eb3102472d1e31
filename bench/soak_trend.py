"""Whether something grows: its first minute against its last, and a line through the readings of its last part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EDGE_S = 60.0
"""Start and end are medians over so long: one reading says what the moment was like."""
WINDOW_S = 1200.0

Points = Sequence[tuple[float, float]]
"""(seconds, value), the earliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Of one value of one process, or of several of a kind."""

    start: float
    end: float
    growth: float
    """Over the last part, by a line of least squares through it."""
    window_s: float
    """How long that part was."""
    by_minute: tuple[float, ...]
    """Medians."""

    @property
    def per_hour(self) -> float:
        """If it went on like this."""
        return self.growth * 3600 / self.window_s if self.window_s else 0.0


def trend(points: Points, *, window_s: float = WINDOW_S) -> Trend:
    """Raises ValueError without any reading."""
    if not points:
        raise ValueError("there are no readings")
    first_s, last_s = points[0][0], points[-1][0]
    late = [point for point in points if point[0] >= last_s - window_s]
    spans_s = late[-1][0] - late[0][0]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope if spans_s else 0.0
    minutes = range(int((last_s - first_s) // 60) + 1)
    return Trend(
        start=_median(points, lambda at_s: at_s <= first_s + EDGE_S),
        end=_median(points, lambda at_s: at_s >= last_s - EDGE_S),
        growth=slope * spans_s,
        window_s=spans_s,
        by_minute=tuple(
            _median(points, lambda at_s: int((at_s - first_s) // 60) == number)  # noqa: B023  # called here
            for number in minutes
            if any(int((at_s - first_s) // 60) == number for at_s, _ in points)
        ),
    )


def _median(points: Points, counts: Callable[[float], bool]) -> float:
    return statistics.median(value for at_s, value in points if counts(at_s))


MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much may be added in the last part and count as none."""

    share: float
    """Of the start."""
    least: float
    """Whatever the start."""

    def is_flat(self, found: Trend) -> bool:
        """What shrinks is flat."""
        return found.growth <= max(self.share * found.start, self.least)


LIMITS = {
    "rss": Limit(share=0.02, least=5 * MIB),
    "descriptors": Limit(share=0.0, least=10),
    "threads": Limit(share=0.0, least=10),
}
