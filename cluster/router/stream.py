"""One request on one replica, as the router sees it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster import status
from cluster.errors import BrokenStream, ReplicaLost, ReplicaUnresponsive, ReplicaUnsound, SlowReader
from cluster.router.loss import LossKind, Verdict
from protos import generation_pb2, replica_pb2

if TYPE_CHECKING:
    from cluster.router.link import Link

MAX_QUEUED_BYTES = 256 * 1024
ERRORS: dict[LossKind, type[ReplicaLost]] = {
    LossKind.CRASHED: ReplicaLost,
    LossKind.STALLED: ReplicaUnresponsive,
    LossKind.SILENT: ReplicaUnresponsive,
    LossKind.UNSOUND: ReplicaUnsound,
}


class LinkStream:
    """Iterates over the pieces of one answer and keeps count of the tokens that are still to come.

    Raises what the replica ended it with (RemoteError), ReplicaLost, BrokenStream or SlowReader.
    """

    __slots__ = (
        "_cost_left",
        "_delivered",
        "_error",
        "_has_begun",
        "_has_ended",
        "_heard_s",
        "_limit",
        "_limit_bytes",
        "_link",
        "_opened_s",
        "_pieces",
        "_prompt_cost",
        "_queued_bytes",
        "_sequence",
        "_waiter",
        "age_s",
        "is_on_trial",
        "is_scheduled",
        "on_trial_passed",
        "stream_id",
        "trial_share",
        "unheard_s",
        "verdict",
    )

    def __init__(
        self,
        link: Link,
        stream_id: int,
        *,
        prompt_cost: int,
        cost: int,
        limit: int,
        limit_bytes: int = MAX_QUEUED_BYTES,
        next_sequence: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self._link = link
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._queued_bytes = 0
        self._prompt_cost = prompt_cost
        self._cost_left = cost
        self._pieces: deque[generation_pb2.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._has_begun = self._has_ended = False
        self.is_scheduled = self.is_on_trial = False
        """See cluster.router.loss.Witnessed."""
        self.on_trial_passed: Callable[[], None] | None = None
        self.verdict = Verdict.INNOCENT
        """What its replica's loss makes of it."""
        self.trial_share = 0.0
        """Of the time that all trials after that loss may take, what this one may."""
        self.unheard_s = 0.0
        """How long before that loss the replica may have sent the last piece that arrived."""
        self.age_s = 0.0
        """At that loss."""
        self._opened_s = self._heard_s = time.monotonic()
        self._sequence = next_sequence
        self._delivered = 0

    @property
    def delivered(self) -> int:
        """Tokens that have arrived from the replica."""
        return self._delivered

    @property
    def is_broken(self) -> bool:
        """Whether the replica left something out."""
        return isinstance(self._error, BrokenStream)

    def __aiter__(self) -> LinkStream:
        return self

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces.popleft()
        self._queued_bytes -= piece.ByteSize()
        return piece

    def push(self, event: replica_pb2.StreamEvent) -> None:
        """Take what the replica sent for this stream."""
        kind = event.WhichOneof("kind")
        if kind == "response":
            self._take(event.response)
        elif kind == "phase":
            self._enter(event.phase)
        if event.end:
            self._has_ended = True
            self._release(self._cost_left)
        if kind == "error":
            self.fail(status.remote_error(event.error))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise `error` once the pieces that have arrived are read."""
        if self._error is None:
            self._error = error
            self._wake()

    def lose(
        self, kind: LossKind, verdict: Verdict = Verdict.INNOCENT, trial_share: float = 0.0, lag_s: float = 0.0
    ) -> None:
        """The replica is gone."""
        if not self._has_ended:
            error = ERRORS[kind]
            self.verdict, self.trial_share = verdict, trial_share
            now_s = time.monotonic()
            self.age_s = now_s - self._opened_s
            self.unheard_s = min(now_s - self._heard_s + lag_s, self.age_s)
            self._has_ended = True
            self._release(self._cost_left)
            self.fail(error(self._link.name, self._delivered))

    def close(self) -> None:
        """End the request on the replica, unless it has ended there."""
        self._release(self._cost_left)
        self._link.forget(self.stream_id, cancel=not self._has_ended)

    def _take(self, piece: generation_pb2.GenerateResponse) -> None:
        if self._error is not None:
            return
        if piece.sequence != self._sequence:
            self._break(BrokenStream(self._link.name, self._sequence, piece.sequence))
            return
        if len(self._pieces) >= self._limit:
            self._break(SlowReader(self._limit, "messages"))
            return
        if self._pieces and self._queued_bytes + piece.ByteSize() > self._limit_bytes:
            self._break(SlowReader(self._limit_bytes, "bytes"))
            return
        num_tokens = sum(len(choice.token_ids) for choice in piece.choices)
        self._release(num_tokens if self._has_begun else num_tokens + self._prompt_cost)
        self._has_begun = self.is_scheduled = True
        self._heard_s = time.monotonic()
        self._sequence += 1
        self._delivered += num_tokens
        self._queued_bytes += piece.ByteSize()
        self._pieces.append(piece)

    def _enter(self, phase: replica_pb2.StreamPhase.ValueType) -> None:
        self.is_scheduled = True
        if phase != replica_pb2.STREAM_PHASE_SCHEDULED:
            self.is_on_trial = phase == replica_pb2.STREAM_PHASE_TRIAL_BEGAN
        if phase == replica_pb2.STREAM_PHASE_TRIAL_PASSED and self.on_trial_passed is not None:
            self.on_trial_passed()

    def _break(self, error: Exception) -> None:
        """End it here and on the replica; what was not read is dropped, for it may be much."""
        self._pieces.clear()
        self._queued_bytes = 0
        self.fail(error)
        self.close()

    def _release(self, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self._cost_left)
        self._cost_left -= num_tokens
        self._link.outstanding_tokens -= num_tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
