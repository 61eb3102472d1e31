"""Which replica a request goes to: pure functions over snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.router.want import Want
from protos import control_pb2

READINESS_COST = {
    control_pb2.GRAPH_READINESS_UNSPECIFIED: 1.0,
    control_pb2.GRAPH_READINESS_EAGER: 4.0,
    control_pb2.GRAPH_READINESS_PARTIAL: 2.0,
    control_pb2.GRAPH_READINESS_FULL: 1.0,
}
"""Rough cost of a token against one that comes from a captured graph."""
DEFAULT_BOUND = 2.0
STRAGGLER = 2.0
"""A replica whose steps take so many times its peers' is for what they have no row for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take the request, as the router knows it at this moment."""

    name: str
    outstanding_tokens: int
    """Placed by this router and not yet delivered."""
    foreign_tokens: int = 0
    """Outstanding beside those, as of the last load report: what other routers placed there."""
    readiness: control_pb2.GraphReadiness.ValueType = control_pb2.GRAPH_READINESS_UNSPECIFIED
    slowness: float = 1.0
    """How many times slower its steps are than its peers'."""
    free_slots: tuple[tuple[int, int], ...] = ()
    """(tier in tokens, sequences of it that could start), ascending, as of the last load report."""
    num_placed_since: int = 0
    """Requests placed here since that report."""
    num_free_rows: int = 0
    """Sequences that could start now, as far as is known."""


class Policy(Protocol):
    """Chooses one of at least one candidate."""

    def __call__(self, candidates: Sequence[Candidate], want: Want) -> int:
        """Index of the replica that gets the request."""


class LeastOutstandingTokens:
    """The replica that would be through first if the request were placed there: the least of `scores`.

    All replicas are looked at: the router's own counters are exact and there are few of them. Equal scores are taken in
    turn. It fails in that answers that end early look as long as they were allowed to be, until they end.
    """

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Candidate], want: Want) -> int:
        """See Policy."""
        all_scores = scores(candidates, want.cost)
        best = min(all_scores)
        ties = [index for index, score in enumerate(all_scores) if score == best]
        self._turn += 1
        return ties[self._turn % len(ties)]


class PrefixAffinity:
    """Prompts that begin alike go to the same replica, which has their first blocks cached, unless it is too busy.

    Replicas are ranked by a hash of the prefix and their name, so a replica that comes or goes moves only its own
    prefixes and routers agree without talking. The first in the ranking is taken whose score is at most `bound` times
    the least one: a prefix that everybody sends spreads over as many replicas as its load needs. Prompts too short to
    share a block go where there is least to do. It fails in that it does not know whether a cache still holds a prefix.
    """

    def __init__(self, bound: float = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._least = LeastOutstandingTokens()

    def __call__(self, candidates: Sequence[Candidate], want: Want) -> int:
        """See Policy."""
        if not want.prefix:
            return self._least(candidates, want)
        all_scores = scores(candidates, want.cost)
        limit = self._bound * min(all_scores)
        allowed = [index for index, score in enumerate(all_scores) if score <= limit]
        return max(allowed, key=lambda index: rank(want.prefix, candidates[index].name))


class TierFit:
    """Of the replicas with a free slot in the smallest tier that holds the request, the one with least to do.

    With no free slot anywhere, or no report yet, all are looked at. Failure mode: reports are as old as the load
    period; what this router placed since counts against every tier, whatever its length.
    """

    def __init__(self) -> None:
        self._least = LeastOutstandingTokens()

    def __call__(self, candidates: Sequence[Candidate], want: Want) -> int:
        """See Policy."""
        fitting = [index for index, one in enumerate(candidates) if has_free_slot(one, want.length)]
        if not fitting:
            return self._least(candidates, want)
        return fitting[self._least([candidates[index] for index in fitting], want)]


def without_stragglers(candidates: Sequence[Candidate], num_sequences: int, held: Collection[int] = ()) -> list[int]:
    """Indexes of those worth looking at: all but stragglers and those `held` up now, while another has rows for the request.

    Sequences are decoded together: beside others on a fast replica a request takes its own tokens times that replica's
    step, however much more those are to do, so that an idle straggler only delays it. Once rows are short, stragglers
    take their part by `scores`. Given nothing they show nothing, until their slowness is forgotten and tried again.
    """
    quick = [index for index, one in enumerate(candidates) if one.slowness < STRAGGLER and index not in held]
    if any(candidates[index].num_free_rows >= num_sequences for index in quick):
        return quick
    return list(range(len(candidates)))


def scores(candidates: Sequence[Candidate], cost: int) -> list[float]:
    """For each: tokens outstanding, the request's own included, times what a token costs there against the best.

    That is its measured slowness, or a guess from its graph readiness where that says more.
    """
    guesses = [READINESS_COST.get(candidate.readiness, 1.0) for candidate in candidates]
    best = min(guesses)
    return [
        (one.outstanding_tokens + one.foreign_tokens + cost) * max(guess / best, one.slowness)
        for one, guess in zip(candidates, guesses, strict=True)
    ]


def rank(prefix: bytes, name: str) -> bytes:
    """A replica's place for a prefix: the largest comes first."""
    return hashlib.blake2b(name.encode(), key=prefix, digest_size=8).digest()


def has_free_slot(candidate: Candidate, length: int) -> bool:
    """Whether a sequence of `length` tokens could start now in the smallest tier that holds it."""
    free = next((free for tier, free in candidate.free_slots if tier >= length), 0)
    return free > candidate.num_placed_since


POLICIES: Mapping[str, Callable[[float], Policy]] = {
    "least-tokens": lambda _: LeastOutstandingTokens(),
    "prefix": PrefixAffinity,
    "tier-fit": lambda _: TierFit(),
}
"""By name, made with the bound of a router's config."""
