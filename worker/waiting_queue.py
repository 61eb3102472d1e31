"""The order in which sequences that wait get a row."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from worker.request import Criticality, GenerateRequest
from worker.sequence import Sequence

FAIR_TURN = 8
"""One start in so many goes to whoever has waited longest, whatever its class: no class waits for ever."""


class WaitingQueue:
    """First those that were running before, here or elsewhere, then by criticality, and within a class in the order of arrival.

    Only the engine's thread changes it; `len` and `num_below` may be asked from any.
    """

    def __init__(self) -> None:
        self._front: deque[Sequence] = deque()
        self._classes: dict[Criticality, deque[Sequence]] = {one: deque() for one in sorted(Criticality, reverse=True)}
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        for waiting in self._classes.values():
            yield from waiting

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue them behind others of their class."""
        for sequence in sequences:
            self._classes[sequence.request.criticality].append(sequence)

    def add_first(self, sequences: list[Sequence]) -> None:
        """Queue them before everything else, in this order."""
        self._front.extendleft(reversed(sequences))

    def add_begun(self, sequences: Iterable[Sequence]) -> None:
        """Queue them before all of which nothing has begun, behind others that ran before: their clients are in the middle."""
        self._front.extend(sequences)

    @property
    def head(self) -> Sequence:
        """Whose turn it is; there must be one."""
        return self._next()[0]

    def pop(self) -> Sequence:
        """Take the head out: it starts."""
        source = self._next()
        if source is not self._front:
            self._num_started += 1
        return source.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Take one out wherever it stands."""
        source = self._classes[sequence.request.criticality]
        (self._front if sequence in self._front else source).remove(sequence)

    def num_below(self, criticality: Criticality) -> int:
        """Sequences of less critical requests."""
        return sum(len(waiting) for one, waiting in self._classes.items() if one < criticality)

    def less_critical(self, criticality: Criticality, num_sequences: int) -> list[GenerateRequest]:
        """Requests to give up so that `num_sequences` more fit; none if they would not be enough.

        The least critical go first, and of a class those that came last. A request of which anything has started, or
        was delivered, is never among them.
        """
        chosen: list[GenerateRequest] = []
        for one in sorted(Criticality):
            if one >= criticality:
                return []
            for request in _untouched(self._classes[one]):
                chosen.append(request)
                num_sequences -= request.sampling.n
                if num_sequences <= 0:
                    return chosen
        return []

    def _next(self) -> deque[Sequence]:
        if self._front:
            return self._front
        waiting = [one for one in self._classes.values() if one]
        if self._num_started % FAIR_TURN == FAIR_TURN - 1:
            return min(waiting, key=lambda one: one[0].arrival_s)
        return waiting[0]


def _untouched(waiting: deque[Sequence]) -> Iterator[GenerateRequest]:
    """Requests all of whose choices wait, the youngest first."""
    counts = Counter(sequence.request.request_id for sequence in waiting)
    seen: set[str] = set()
    for sequence in reversed(waiting):
        request = sequence.request
        is_whole = counts[request.request_id] == request.sampling.n and not request.delivered
        if is_whole and request.request_id not in seen:
            seen.add(request.request_id)
            yield request
