"""What a router counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from cluster.criticality import NAMES
from cluster.metrics.families import SECONDS, Histogram, counter, gauge, plain_counter, plain_gauge
from protos import control_pb2
from worker.request import Criticality

STATES = tuple(state for state in control_pb2.ReplicaState.values() if state)
REASONS = ("queue_full", "too_late")
NOTHING: Mapping[tuple[str, Criticality], int] = {}
NOWHERE: Mapping[str, int] = {}
BREAKERS = tuple(breaker for breaker in control_pb2.Breaker.values() if breaker)
READINESS = tuple(readiness for readiness in control_pb2.GraphReadiness.values() if readiness)


class RouterMetrics:
    """Placements and times; what concerns the replicas comes from their loads at the time of a scrape.

    Used on the event loop alone: for each placement and each first piece of an answer.
    """

    def __init__(self) -> None:
        self._placements = 0
        self._repeated = self._resumed = self._trials = 0
        self._fenced = self._poisoned = 0
        self._added = Histogram((0.0001, 0.00025, *SECONDS))
        self._first_token = Histogram()

    def placed(self, attempt: int, *, is_resumed: bool = False, is_trial: bool = False) -> None:
        """A replica was given a request, for the `attempt`-th time; is something of its answer delivered?"""
        self._placements += 1
        self._repeated += attempt > 1
        self._resumed += is_resumed
        self._trials += is_trial

    def fenced(self) -> None:
        """A replica sent something for a request that it does not have any more."""
        self._fenced += 1

    def poisoned(self) -> None:
        """A request was proven to end replicas."""
        self._poisoned += 1

    def started(self, *, placed_after_s: float, first_token_s: float) -> None:
        """The first piece of an answer came; both times are from the arrival of its request."""
        self._added.observe(placed_after_s)
        self._first_token.observe(first_token_s)

    def families(
        self,
        loads: Sequence[control_pb2.ReplicaLoad],
        num_streams: int,
        *,
        num_trips: int = 0,
        refusals: Mapping[tuple[str, Criticality], int] = NOTHING,
        failing: Mapping[str, int] = NOWHERE,
    ) -> Iterator[Metric]:
        """For a scrape."""
        yield plain_gauge("streams", "Requests being answered.", num_streams)
        yield plain_counter("placements", "Requests given to a replica, repeated ones included.", self._placements)
        yield plain_counter(
            "repeated_placements", "Those whose earlier replica was lost or would not take them.", self._repeated
        )
        yield plain_counter("resumed_streams", "Placements after the beginning of an answer.", self._resumed)
        yield plain_counter("trials", "Placements of requests suspected of ending a replica.", self._trials)
        yield plain_counter(
            "fenced_events", "Events that came for requests given up or placed elsewhere.", self._fenced
        )
        yield plain_counter("poisoned_requests", "Requests proven to end the replica they run on.", self._poisoned)
        yield _replicas(loads)
        yield _readiness(loads)
        yield _refusals(refusals)
        yield _breakers(loads)
        yield plain_counter("breaker_trips", "How often a replica that was in service was taken out of it.", num_trips)
        help_text = "Processes in a row that ended badly on one GPU, or under one name; from two on."
        yield gauge("bad_ends", help_text, (((place,), count) for place, count in failing.items()), ("place",))
        slowest = max((load.slowness for load in loads if load.state == control_pb2.REPLICA_STATE_READY), default=1.0)
        yield plain_gauge(
            "slowest_replica_ratio", "Step time of the slowest READY replica against its peers'.", slowest
        )
        yield self._added.family("router_seconds", "From the arrival of a request to its placement.")
        yield self._first_token.family(
            "router_time_to_first_token_seconds", "From the arrival of a request to its first token."
        )


def _replicas(loads: Sequence[control_pb2.ReplicaLoad]) -> Metric:
    counts = Counter(load.state for load in loads)
    names = {state: control_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower() for state in STATES}
    return gauge("replicas", "Known replicas.", (((name,), counts[state]) for state, name in names.items()), ("state",))


def _readiness(loads: Sequence[control_pb2.ReplicaLoad]) -> Metric:
    counts = Counter(load.load.readiness for load in loads if load.state == control_pb2.REPLICA_STATE_READY)
    names = {one: control_pb2.GraphReadiness.Name(one).removeprefix("GRAPH_READINESS_").lower() for one in READINESS}
    samples = (((name,), counts[one]) for one, name in names.items())
    return gauge("ready_replicas", "READY replicas, by how much runs from graphs.", samples, ("readiness",))


def _refusals(counts: Mapping[tuple[str, Criticality], int]) -> Metric:
    samples = (((why, name), counts.get((why, one), 0)) for why in REASONS for name, one in NAMES.items())
    help_text = "Requests not taken on: every queue was full, or they would have waited for too long."
    return counter("refused_requests", help_text, samples, ("reason", "criticality"))


def _breakers(loads: Sequence[control_pb2.ReplicaLoad]) -> Metric:
    counts = Counter(load.breaker for load in loads)
    names = {one: control_pb2.Breaker.Name(one).removeprefix("BREAKER_").lower() for one in BREAKERS}
    samples = (((name,), counts[one]) for one, name in names.items())
    return gauge("breakers", "Known replicas, by whether requests are placed on them.", samples, ("state",))
