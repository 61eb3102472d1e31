"""What a router holds for or against one replica."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from cluster.router.breaker import Breaker, BreakerState
from cluster.router.places import Places
from cluster.router.slowness import Pace, Slowness, pace_of
from protos import control_pb2, replica_pb2
from worker.progress import allowed_step_s

BREAKERS = {
    BreakerState.CLOSED: control_pb2.BREAKER_CLOSED,
    BreakerState.OPEN: control_pb2.BREAKER_OPEN,
    BreakerState.HALF_OPEN: control_pb2.BREAKER_HALF_OPEN,
}
MAX_JUMP_S = 1.0
INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]
BROKEN = replica_pb2.StreamEvent(error=replica_pb2.StreamError(code=INTERNAL), end=True)
"""Stands for the end of a stream whose pieces did not fit together."""


class StepWatch:
    """Health as forward progress, as far as load reports show it."""

    def __init__(self) -> None:
        self._steps = -1
        self._moved_s = 0.0
        self._age_s = 0.0

    def is_stalled(self, load: control_pb2.Load, now_s: float) -> bool:
        """Whether no step was completed for max(2 s, 4 times its predicted duration) while there was work.

        The replica's own clock on the step under way counts, and so does a counter that stands still: an engine may
        hang between two steps. Loading and capturing are excused. An age that jumps from one report to the next is
        believed only when another report confirms it: a process that was not running at all has made no steps either.
        """
        has_work = load.running + load.waiting > 0
        if load.steps != self._steps or not has_work or load.is_preparing:
            self._steps, self._moved_s, self._age_s = load.steps, now_s, 0.0
        if load.is_preparing:
            return False
        before_s, self._age_s = self._age_s, max(load.step_age_s, now_s - self._moved_s)
        limit_s = allowed_step_s(load.predicted_step_s)
        return self._age_s > limit_s and before_s > limit_s - MAX_JUMP_S

    def forget(self) -> None:
        """A new connection: what was seen over the old one says nothing."""
        self._steps = -1


class Vitals:
    """Breaker, progress and pace of one replica, fed by the frames of its stream, and the record of its place."""

    def __init__(
        self,
        *,
        pause_min_s: float,
        pause_max_s: float,
        may_open: Callable[[], bool],
        places: Places | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_open` tells whether another replica takes the requests that this one does not get."""
        self.breaker = Breaker(pause_min_s=pause_min_s, pause_max_s=pause_max_s, may_open=may_open, clock=clock)
        self.slowness = Slowness()
        self.pace: Pace | None = None
        self.place = ""
        """The GPU it computes on, or its name where none is known; "" before it has said so."""
        self._incarnation = ""
        self._places = places or Places(clock=clock)
        self._may_open = may_open
        self._watch = StepWatch()
        self._clock = clock

    @property
    def num_ends(self) -> int:
        """Processes in a row that ended badly in its place."""
        return self._places.num_ends(self.place)

    @property
    def last_end(self) -> str:
        """Why the last of them ended."""
        return self._places.last_end(self.place)

    @property
    def place_pause_s(self) -> float:
        """Until it may have its canary, for what others did in its place; 0 if nobody else takes requests."""
        return self._places.pause_left_s(self.place) if self._may_open() else 0.0

    @property
    def is_failing(self) -> bool:
        """Whether it had better get few requests, for the same reason."""
        return self._places.is_failing(self.place)

    def note_place(self, place: str, incarnation: str) -> None:
        """It is attached."""
        self.place, self._incarnation = place, incarnation
        self._places.lives(place, incarnation)

    def note_load(self, load: control_pb2.Load) -> bool:
        """Take a load report; whether the replica has stalled."""
        self.pace = pace_of(load, self.pace)
        return self._watch.is_stalled(load, self._clock())

    def note_end(self, event: replica_pb2.StreamEvent) -> None:
        """Take the last event of a stream. Only an INTERNAL error counts against the replica."""
        if event.WhichOneof("kind") != "error":
            self.breaker.succeeded()
        elif event.error.code == INTERNAL:
            self.breaker.failed()

    def note_loss(self, *, was_expected: bool, how: str = "") -> None:
        """The connection has ended; `how` the process did, if it seems to have."""
        self._watch.forget()
        self.pace = None
        if was_expected:
            self.breaker.reconnecting()
        else:
            self.breaker.lost()
            if how and self.place:
                self._places.ended(self.place, self._incarnation, how)
