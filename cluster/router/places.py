"""Places where processes end badly again and again: a GPU, or a replica's name where no GPU is known."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

MEMORY_S = 600.0
"""Ends in a row have no more than this between them, beside the pause; a place that is well for longer is as good as new."""
MIN_FAILING = 2
"""One bad end may be anybody's; from the second in a row on the place is suspected."""
MAX_PLACES = 1024
MAX_EXCUSED = 256


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended, and when."""

    incarnation: str
    ended_s: float
    how: str


class Places:
    """Counts bad ends in a row by place, over all processes there, and says what the next one has to put up with.

    Another process on a GPU that breaks those it has gets the same end, and its clients another loss. From the second end
    in a row on it waits before its canary, counted from that end: `pause_min_s`, doubled with each further one up to
    `pause_max_s`; and until MEMORY_S have passed it is given few requests while others have room. Ends that a request was
    found guilty of are excused. Failure mode: what kills whatever runs, such as a bad version, makes every place look bad;
    so no pause is to keep the last replica from its work.
    """

    def __init__(
        self, *, pause_min_s: float = 2.0, pause_max_s: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause_min_s = pause_min_s
        self._pause_max_s = pause_max_s
        self._clock = clock
        self._ends: OrderedDict[str, list[End]] = OrderedDict()
        self._excused: deque[str] = deque(maxlen=MAX_EXCUSED)

    def ended(self, place: str, incarnation: str, how: str) -> None:
        """A process ended there that nobody had asked to."""
        if incarnation in self._excused:
            return
        ends = [end for end in self._of(place) if end.incarnation != incarnation]
        self._ends[place] = [*ends, End(incarnation, self._clock(), how)]
        self._ends.move_to_end(place)
        if len(self._ends) > MAX_PLACES:
            self._ends.popitem(last=False)

    def lives(self, place: str, incarnation: str) -> None:
        """A process is there; if it was taken for ended, only its connection was."""
        self._keep(place, [end for end in self._of(place) if end.incarnation != incarnation])

    def excuse(self, incarnations: Collection[str]) -> None:
        """A request ended these, and no place."""
        self._excused.extend(incarnations)
        for place, ends in list(self._ends.items()):
            self._keep(place, [end for end in ends if end.incarnation not in incarnations])

    def num_ends(self, place: str) -> int:
        """Bad ends in a row there."""
        return len(self._of(place))

    def is_failing(self, place: str) -> bool:
        """Whether what is placed there had better be little."""
        return self.num_ends(place) >= MIN_FAILING

    def last_end(self, place: str) -> str:
        """How the last process ended there; "" = it did not."""
        ends = self._of(place)
        return ends[-1].how if ends else ""

    def pause_left_s(self, place: str) -> float:
        """Until a process there may have its canary."""
        ends = self._of(place)
        return max(0.0, ends[-1].ended_s + self._pause_s(len(ends)) - self._clock()) if ends else 0.0

    @property
    def failing(self) -> Mapping[str, int]:
        """Bad ends in a row, of places with several."""
        counts = {place: self.num_ends(place) for place in list(self._ends)}
        return {place: count for place, count in counts.items() if count >= MIN_FAILING}

    def _pause_s(self, num_ends: int) -> float:
        if num_ends < MIN_FAILING:
            return 0.0
        return min(self._pause_min_s * 2.0 ** min(num_ends - MIN_FAILING, 32), self._pause_max_s)

    def _of(self, place: str) -> list[End]:
        """Its ends in a row; forgets those that are long ago."""
        ends = self._ends.get(place, [])
        if ends and self._clock() - ends[-1].ended_s > MEMORY_S + self._pause_s(len(ends)):
            del self._ends[place]
            return []
        return ends

    def _keep(self, place: str, ends: list[End]) -> None:
        if ends:
            self._ends[place] = ends
        else:
            self._ends.pop(place, None)
