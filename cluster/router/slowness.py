"""How slow a replica is against its peers: pure functions over reported loads."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from protos import control_pb2

MAX_PEERS = 32
"""Compared with, at most: a random sample of more says the same."""
LIMIT = 16.0
DEAD_BAND = 1.5
"""Under this the difference is taken for noise."""
LEARNING_S = 1.0
FORGETTING_S = 30.0
"""A replica that is given nothing shows nothing: it is tried again."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A replica's recent step, the rows it had, and how many steps there have been."""

    step_ms: float
    rows: int
    steps: int


def pace_of(load: control_pb2.Load, before: Pace | None) -> Pace | None:
    """The pace a load report shows; `before` while nothing has changed; None before the first step.

    A step under way that takes longer than any was expected to makes the mean look longer by as much: a slow one is
    seen before it ends. A long prefill is no slowness, since it was expected.
    """
    is_late = 0 < load.predicted_step_s < load.step_age_s and not load.is_preparing
    step_ms = load.step_ms * (load.step_age_s / load.predicted_step_s if is_late else 1.0)
    if before is not None and load.steps == before.steps and step_ms <= before.step_ms:
        return before
    return Pace(step_ms, max(load.running, 1), load.steps) if step_ms > 0 else before


def slowness(own: Pace, peers: Sequence[Pace]) -> float | None:
    """How many times longer a step takes than on the median peer; 1 = not slow, None = nobody to compare with.

    Steps with more rows may take longer, in proportion at most: a peer with fewer rows is scaled up to one's own, one
    with more is taken as it is. Both make the estimate too low rather than too high. With one peer the slower of two
    is slow; which of them is to blame is not asked.
    """
    if not peers:
        return None
    expected_ms = statistics.median(peer.step_ms * max(1.0, own.rows / peer.rows) for peer in peers)
    return min(max(1.0, own.step_ms / expected_ms), LIMIT)


class Slowness:
    """One replica's estimate over time; 1 = as fast as its peers."""

    def __init__(self) -> None:
        self.estimate = 1.0
        self._seen: Pace | None = None
        self._updated_s: float | None = None

    @property
    def factor(self) -> float:
        """What multiplies the replica's score."""
        return self.estimate if self.estimate >= DEAD_BAND else 1.0

    def update(self, own: Pace | None, peers: Sequence[Pace], now_s: float) -> None:
        """Move towards what is seen now, or slowly towards 1 when nothing new is."""
        elapsed_s = 0.0 if self._updated_s is None else now_s - self._updated_s
        self._updated_s = now_s
        seen = None if own is None or own is self._seen else slowness(own, peers)
        self._seen = own
        target, time_s = (1.0, FORGETTING_S) if seen is None else (seen, LEARNING_S)
        self.estimate += (target - self.estimate) * (1 - math.exp(-elapsed_s / time_s))


def compare(
    replicas: Sequence[tuple[Slowness, Pace | None]], now_s: float, *, sample: random.Random | None = None
) -> None:
    """Update each replica's estimate against the others."""
    paces = [pace for _, pace in replicas if pace is not None]
    for estimate, own in replicas:
        peers = [pace for pace in paces if pace is not own]
        if len(peers) > MAX_PEERS:
            peers = (sample or random).sample(peers, MAX_PEERS)
        estimate.update(own, peers, now_s)
