"""One request a router is answering, over all its attempts."""

from __future__ import annotations

import time

from cluster.delivered import Delivered
from cluster.router.stream import LinkStream
from cluster.tracing import RequestTrace
from protos import generation_pb2, replica_pb2
from worker.errors import DeadlineExceeded


class Answering:
    """Its deadline, its times, what its client has, and where it is being answered at the moment."""

    __slots__ = (
        "_deadline_s",
        "_error",
        "_placed_s",
        "_router_s",
        "_started_s",
        "_stream",
        "crashed_in",
        "crashed_on",
        "crashed_twice_in_one",
        "delivered",
        "has_started",
        "is_suspect",
        "is_taken_on",
        "model",
        "num_losses",
        "num_lost_trials",
        "num_placements",
        "num_stalled_trials",
        "refused",
        "trace",
        "trial_tokens",
    )

    def __init__(
        self, timeout_s: float | None, delivered: Delivered | None = None, trace: RequestTrace | None = None
    ) -> None:
        self.delivered = delivered or Delivered()
        self.trace = trace
        self.model = ""
        """That of the replica it was placed on; "" before that."""
        self.has_started = False
        """Whether a piece of the answer has gone to the client from here."""
        self.is_taken_on = bool(self.delivered.next_sequence)
        """Some replica has had it, so that it is not refused any more, whatever the load."""
        self.num_placements = 0
        self.num_losses = 0
        """Replicas that were lost while they had it."""
        self.is_suspect = False
        """It may have been what ended one of them."""
        self.num_stalled_trials = 0
        self.num_lost_trials = 0
        """Replicas that crashed while it was tried alone."""
        self.crashed_on: set[str] = set()
        """Incarnations that crashed while they had it."""
        self.crashed_in: set[str] = set()
        """The places of these, which are GPUs where they are known."""
        self.crashed_twice_in_one = False
        self.trial_tokens = 0
        self.refused: set[str] = set()
        """Incarnations that would not take it, or not keep it."""
        self._started_s = time.monotonic()
        self._deadline_s = None if timeout_s is None else self._started_s + timeout_s
        self._placed_s = self._started_s
        self._router_s = 0.0
        """From its arrival to the placement that brought its first piece."""
        self._stream: LinkStream | None = None
        self._error: Exception | None = None

    def time_left_s(self) -> float | None:
        """Until the deadline; None = there is none. Raises DeadlineExceeded when it has passed."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded
        return left_s

    @property
    def placed_after_s(self) -> float:
        """From its arrival to its latest placement."""
        return self._placed_s - self._started_s

    @property
    def elapsed_s(self) -> float:
        """Since its arrival."""
        return time.monotonic() - self._started_s

    def submit(self) -> replica_pb2.Submit:
        """What its next placement brings beside the request."""
        self.num_placements += 1
        return replica_pb2.Submit(
            delivered=self.delivered.to_proto(),
            next_sequence=self.delivered.next_sequence,
            is_trial=self.is_suspect,
            trial_tokens=self.trial_tokens if self.is_suspect else 0,
            is_moved=self.has_started,
        )

    def placed(self, stream: LinkStream) -> None:
        """A replica has it now."""
        self._stream = stream
        self._placed_s = time.monotonic()

    def note_crash(self, incarnation: str, place: str) -> None:
        """A replica crashed that had it."""
        self.crashed_twice_in_one = bool(place) and place in self.crashed_in
        self.crashed_on.add(incarnation)
        self.crashed_in.add(place)

    def clear(self) -> None:
        """It passed a trial: whatever crashed under it before was not its doing."""
        self.is_suspect, self.num_lost_trials = False, 0
        self.crashed_twice_in_one = False
        self.crashed_on.clear()
        self.crashed_in.clear()

    def fail(self, error: Exception) -> None:
        """End it, wherever it is."""
        self._error = error
        if self._stream is not None:
            self._stream.fail(error)

    def check(self) -> None:
        """Raise what it was ended with, or DeadlineExceeded."""
        if self._error is not None:
            raise self._error
        self.time_left_s()

    def stamp(self, piece: generation_pb2.GenerateResponse) -> generation_pb2.GenerateResponse:
        """Note a piece that goes to the client; the last one gets the router's times."""
        if not self.has_started:
            self.has_started = True
            self._router_s = self.placed_after_s
        self.delivered.note(piece)
        if piece.HasField("timings"):
            piece.timings.router_ms = 1000 * self._router_s
            piece.timings.total_ms = 1000 * self.elapsed_s
        return piece
