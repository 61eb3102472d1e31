"""Which replica a request goes to: pure functions over snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos import control_pb2

SLOWNESS = {
    control_pb2.GRAPH_READINESS_UNSPECIFIED: 1.0,
    control_pb2.GRAPH_READINESS_EAGER: 4.0,
    control_pb2.GRAPH_READINESS_PARTIAL: 2.0,
    control_pb2.GRAPH_READINESS_FULL: 1.0,
}
"""Rough cost of a token against one that comes from a captured graph."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take the request, as the router knows it at this moment."""

    name: str
    outstanding_tokens: int
    """Placed by this router and not yet delivered."""
    foreign_tokens: int = 0
    """Outstanding beside those, as of the last load report: what other routers placed there."""
    readiness: control_pb2.GraphReadiness.ValueType = control_pb2.GRAPH_READINESS_UNSPECIFIED


class Policy(Protocol):
    """Chooses one of at least one candidate."""

    def __call__(self, candidates: Sequence[Candidate], cost: int) -> int:
        """Index of the replica that gets a request of `cost` tokens."""


class LeastOutstandingTokens:
    """The replica that would be through first if the request were placed there.

    Score = tokens outstanding, the request's own included, times the slowness of its graph readiness. All replicas are
    looked at: the router's own counters are exact and there are few of them. Equal scores are taken in turn. It fails
    in that answers that end early look as long as they were allowed to be, until they end.
    """

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Candidate], cost: int) -> int:
        """See Policy."""
        scores = [_score(candidate, cost) for candidate in candidates]
        best = min(scores)
        ties = [index for index, score in enumerate(scores) if score == best]
        self._turn += 1
        return ties[self._turn % len(ties)]


def _score(candidate: Candidate, cost: int) -> float:
    tokens = candidate.outstanding_tokens + candidate.foreign_tokens + cost
    return tokens * SLOWNESS.get(candidate.readiness, 1.0)
