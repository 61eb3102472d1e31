"""What a router knows of one replica, and how it reaches it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping

import grpc

from cluster.codec import AnyRequest
from cluster.config import RouterConfig
from cluster.criticality import criticality_to_proto, current_criticality
from cluster.errors import ReplicaLost
from cluster.router.admission import Room, rows_of
from cluster.router.breaker import BreakerState
from cluster.router.connection import Connection
from cluster.router.jitter import Jitter
from cluster.router.loss import HOW, LossKind, Verdict, how_it_failed, judge, trial_shares
from cluster.router.places import Places
from cluster.router.policies import Candidate
from cluster.router.quarantine import Quarantine
from cluster.router.readmission import Readmission
from cluster.router.stream import LinkStream
from cluster.router.vitals import BROKEN, Vitals
from cluster.waiting import happens_within
from protos import control_pb2, generation_pb2, replica_pb2

JITTER = 0.2
LEFT_FAILURES = 16
"""As many failed connections in a row does one count for that a replica ended in order."""

MAX_GPU_CHARS = 128
TRIAL_PHASES = (replica_pb2.STREAM_PHASE_TRIAL_BEGAN, replica_pb2.STREAM_PHASE_TRIAL_PASSED)
log = logging.getLogger(__name__)


class Link:
    """Keeps one Attach stream to a replica alive, and carries requests over it.

    A replica is ready here once it says so and a generation through this very stream has succeeded; a new stream
    starts from nothing. One that has work but makes no progress loses its streams as if it had fallen silent, and is
    out until another canary. `on_change` is called whenever `is_ready` or the graphs' readiness may have changed;
    `has_others` tells whether other replicas are ready.
    """

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        *,
        router: str,
        probe: Callable[[Link], Awaitable[None]],
        on_change: Callable[[], None],
        incarnation: str = "",
        has_others: Callable[[Link], bool] = lambda _: False,
        on_fenced: Callable[[], None] = lambda: None,
        quarantine: Quarantine | None = None,
        places: Places | None = None,
    ) -> None:
        self.address = address
        self.name = address
        self.incarnation = ""
        self.model: control_pb2.ModelInfo | None = None
        self.load = control_pb2.Load()
        self.outstanding_tokens = 0
        """Placed here and neither delivered nor ended."""
        self.num_routers = 0
        """Attached to the replica, this one included; 0 = it has not said."""
        self.vitals = Vitals(
            pause_min_s=config.breaker_pause_min_s,
            pause_max_s=config.breaker_pause_max_s,
            may_open=lambda: has_others(self),
            places=places,
        )
        self._config = config
        self._router = router
        self._readmission = Readmission(self, lambda: probe(self), on_change)
        self._on_change = on_change
        self._on_fenced = on_fenced
        self._quarantine = Quarantine(config.quarantine_s) if quarantine is None else quarantine
        self._expected_incarnation = incarnation
        self._free_slots: tuple[tuple[int, int], ...] = ()
        self._num_placed_since = self._prompt_tokens_since = 0
        self._sizes: dict[int, int] = {}
        self._num_sequences = self._foreign_sequences = self._foreign_tokens = 0
        self._jitter = Jitter()
        self._reported: control_pb2.ReplicaState.ValueType = control_pb2.REPLICA_STATE_UNSPECIFIED
        self._is_retired = self._was_attached = self._has_left = False
        self._connection: Connection | None = None
        self._streams: dict[int, LinkStream] = {}
        self._numbers = itertools.count(1)
        self._failure = LossKind.CRASHED
        self._poke = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the replica answers on the present stream."""
        return self._connection is not None and self.model is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests may be placed here."""
        reports_ready = self._reported == control_pb2.REPLICA_STATE_READY
        return self.is_attached and self.vitals.breaker.is_closed and reports_ready and not self._is_retired

    @property
    def num_streams(self) -> int:
        """Requests of this router that the replica is answering."""
        return len(self._streams)

    @property
    def state(self) -> control_pb2.ReplicaState.ValueType:
        """The replica's state as this router treats it."""
        if not self.is_attached:
            return control_pb2.REPLICA_STATE_FAILED if self._was_attached else control_pb2.REPLICA_STATE_STARTING
        if self._is_retired:
            return control_pb2.REPLICA_STATE_DRAINING
        if self._reported == control_pb2.REPLICA_STATE_READY and not self.vitals.breaker.is_closed:
            return control_pb2.REPLICA_STATE_STARTING
        return self._reported

    @property
    def _is_leaving(self) -> bool:
        return self._reported in (control_pb2.REPLICA_STATE_DRAINING, control_pb2.REPLICA_STATE_STOPPED)

    @property
    def candidate(self) -> Candidate:
        """For the placement policy."""
        return Candidate(
            name=self.name,
            outstanding_tokens=self.outstanding_tokens,
            foreign_tokens=self._foreign_tokens,
            readiness=self.load.readiness,
            slowness=self.vitals.slowness.factor,
            free_slots=self._free_slots,
            num_placed_since=self._num_placed_since,
            num_free_rows=self.num_free_rows,
        )

    def has_rows(self, num_sequences: int) -> bool:
        """Whether so many sequences could start now, as far as is known."""
        return num_sequences <= self.num_free_rows

    @property
    def num_free_rows(self) -> int:
        """Sequences that could start now, as far as is known."""
        return max(0, rows_of(self.load) - self._num_sequences - self._foreign_sequences)

    @property
    def room(self) -> Room:
        """For admission."""
        load = self.load
        return Room(
            max_rows=rows_of(load),
            num_inside=self._num_sequences + self._foreign_sequences,
            prefill_tokens=load.waiting_prefill_tokens + self._prompt_tokens_since,
            prefill_token_s=load.prefill_token_ms / 1000,
            step_s=load.step_ms / 1000,
        )

    @property
    def channel(self) -> grpc.aio.Channel:
        """For calls beside the stream. Raises ReplicaLost when there is none."""
        if self._connection is None:
            raise ReplicaLost(self.name)
        return self._connection.channel

    def start(self) -> None:
        """Dial, and go on doing so."""
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        """There is reason to believe that dialing will work now."""
        self._poke.set()

    def retire(self) -> None:
        """Place nothing here any more; `is_idle` tells when it may be stopped."""
        self._is_retired = True
        self._on_change()

    async def stop(self) -> None:
        """Hang up; what is still running here is lost."""
        if self._connection is not None:
            self._connection.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def open(
        self,
        request: AnyRequest,
        *,
        attempt: int,
        timeout_s: float | None,
        prompt_cost: int,
        cost: int,
        submit: replica_pb2.Submit | None = None,
    ) -> LinkStream:
        """Give the replica a request that counts as `cost` tokens, `prompt_cost` of them until its first piece.

        `submit` brings what else goes with it, such as what earlier attempts delivered; it is used up.
        """
        if self._connection is None:
            raise ReplicaLost(self.name)
        stream_id = next(self._numbers)
        limit = self._config.max_queued_messages
        submit = submit or replica_pb2.Submit()
        stream = LinkStream(
            self,
            stream_id,
            prompt_cost=prompt_cost,
            cost=cost,
            limit=limit,
            limit_bytes=self._config.max_queued_bytes,
            next_sequence=submit.next_sequence,
        )
        self._streams[stream_id] = stream
        self.outstanding_tokens += cost
        self._num_placed_since += 1
        self._prompt_tokens_since += prompt_cost
        self._sizes[stream_id] = size = max(request.sampling.n, 1)
        self._num_sequences += size
        submit.criticality = criticality_to_proto(current_criticality())
        submit.stream_id, submit.attempt, submit.timeout_s = stream_id, attempt, timeout_s or 0.0
        if isinstance(request, generation_pb2.GenerateRequest):
            submit.generate.CopyFrom(request)
        else:
            submit.chat.CopyFrom(request)
        self._connection.send(replica_pb2.RouterFrame(submit=submit))
        return stream

    def forget(self, stream_id: int, *, cancel: bool) -> None:
        """Take a stream off the table; unknown ids are ignored."""
        self._release(stream_id)
        if self._streams.pop(stream_id, None) is not None and cancel:
            self._cancel(stream_id)

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        """Let the replica's other routers know what they had better refuse."""
        if self._connection is None or self.model is None:
            return
        for key, ttl_s in verdicts.items():
            verdict = replica_pb2.PoisonVerdict(fingerprint=key, ttl_s=ttl_s)
            self._connection.send(replica_pb2.RouterFrame(poison=verdict))

    def _release(self, stream_id: int) -> None:
        """Its sequences hold rows no more."""
        self._num_sequences -= self._sizes.pop(stream_id, 0)

    def _cancel(self, stream_id: int) -> None:
        if self._connection is not None:
            self._connection.send(replica_pb2.RouterFrame(cancel=replica_pb2.Cancel(stream_id=stream_id)))

    async def _run(self) -> None:
        failures = 0
        while True:
            self._was_attached = False
            reason = await self._attach()
            log.info("replica %s (%s): %s", self.name, self.address, reason)
            # One that has left on purpose says so when it is back.
            failures = LEFT_FAILURES if self._has_left else 0 if self._was_attached else failures + 1
            await self._pause(failures)

    async def _attach(self) -> str:
        connection = self._connection = Connection(self.address, self._config, self._receive)
        connection.send(replica_pb2.RouterFrame(hello=replica_pb2.RouterHello(router=self._router)))
        try:
            return await connection.run()
        finally:
            self._lose(connection)

    def _lose(self, connection: Connection) -> None:
        was_expected = not self.is_attached or self._is_leaving or connection.is_closing
        self.vitals.note_loss(was_expected=was_expected, how="" if connection.is_silent else HOW[self._failure])
        self._has_left = self._is_leaving
        self._connection = self.model = None
        self._reported = control_pb2.REPLICA_STATE_UNSPECIFIED
        self._foreign_tokens = self.num_routers = 0
        self._readmission.cancel()
        self._lose_streams(LossKind.SILENT if connection.is_silent else LossKind.CRASHED)
        self._jitter.forget()
        self._on_change()

    def _lose_streams(self, kind: LossKind) -> None:
        streams, self._streams = list(self._streams.values()), {}
        verdicts = judge(streams, kind, max_rows=self.load.max_rows)
        shares = iter(trial_shares(verdicts.count(Verdict.SUSPECT)))
        lag_s = self._jitter.spread_s(time.monotonic())
        # Whoever came last is the likeliest cause: it learns of the loss first and so is tried first, and longest.
        for stream, verdict in reversed(list(zip(streams, verdicts, strict=True))):
            stream.lose(kind, verdict, next(shares) if verdict is Verdict.SUSPECT else 0.0, lag_s)

    def _expel(self) -> None:
        """It makes no progress: its requests go elsewhere, and what it may still send for them reaches nobody."""
        log.warning("replica %s (%s) makes no progress", self.name, self.incarnation)
        self.vitals.breaker.stalled()
        for stream_id in self._streams:
            self._cancel(stream_id)
        self._lose_streams(LossKind.STALLED)
        self._readmission.start()
        self._on_change()

    async def _pause(self, failures: int) -> None:
        pause_s = min(self._config.reconnect_min_s * 2 ** min(failures, 16), self._config.reconnect_max_s)
        await happens_within(self._poke, pause_s * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311
        self._poke.clear()

    def _receive(self, frame: replica_pb2.ReplicaFrame) -> None:
        if frame.HasField("hello"):
            self._greet(frame.hello)
        # The state first: a request refused by a draining replica must not come back to it.
        if frame.state:
            self._report(frame.state)
        has_failed = self._reported == control_pb2.REPLICA_STATE_FAILED
        for event in frame.events:
            if event.phase in TRIAL_PHASES and self._connection is not None:
                noted = replica_pb2.TrialNoted(stream_id=event.stream_id)
                self._connection.send(replica_pb2.RouterFrame(trial_noted=noted))
            stream = self._streams.get(event.stream_id)
            if stream is None:
                self._on_fenced()
            elif not (has_failed and event.HasField("error")):
                stream.push(event)
                if event.end:
                    self._release(event.stream_id)
                    self._note_end(event)
                elif stream.is_broken:
                    self._note_end(BROKEN)
        if has_failed:  # it says goodbye to each of them; together they say more
            self._fail(how_it_failed(frame.events, step_age_s=self.load.step_age_s, code=frame.failed_with))
        for verdict in frame.poisons:
            self._quarantine.learn(verdict.fingerprint, verdict.ttl_s)
        if frame.HasField("load"):
            self.num_routers = frame.num_routers
            self._note_load(frame.load)

    def _fail(self, kind: LossKind) -> None:
        """It is over, and has said so; the connection will break."""
        if self._failure is LossKind.CRASHED:
            self._failure = kind
        if self._streams:
            self._lose_streams(kind)

    def _note_end(self, event: replica_pb2.StreamEvent) -> None:
        was_closed = self.vitals.breaker.is_closed
        self.vitals.note_end(event)
        if was_closed and not self.vitals.breaker.is_closed:
            log.warning("replica %s (%s) fails too many requests", self.name, self.incarnation)
            self._readmission.start()
            self._on_change()

    def _note_load(self, load: control_pb2.Load) -> None:
        has_changed = load.readiness != self.load.readiness
        self._jitter.note(time.monotonic())
        self.load = load
        self._foreign_tokens = max(0, load.outstanding_tokens - self.outstanding_tokens)
        self._free_slots = tuple((tier.tier, tier.free_slots) for tier in load.tiers)
        self._num_placed_since = self._prompt_tokens_since = 0
        self._foreign_sequences = max(0, load.running + load.waiting - self._num_sequences)
        if has_changed:
            self._on_change()
        if self.vitals.note_load(load) and self.vitals.breaker.state is not BreakerState.OPEN:
            self._expel()

    def _greet(self, hello: replica_pb2.ReplicaHello) -> None:
        if self._expected_incarnation not in ("", hello.incarnation):
            log.warning("%s is %s now, not %s", self.address, hello.incarnation, self._expected_incarnation)
            if self._connection is not None:
                self._connection.close()
            return
        self.name, self.incarnation, self.model = hello.replica, hello.incarnation, hello.model
        self._was_attached = True
        self._failure = LossKind.CRASHED
        self.vitals.note_place(hello.gpu[:MAX_GPU_CHARS] or hello.replica, hello.incarnation)
        self.tell(self._quarantine.verdicts)

    def _report(self, state: control_pb2.ReplicaState.ValueType) -> None:
        if state == self._reported or not self.is_attached:
            return
        self._reported = state
        if state == control_pb2.REPLICA_STATE_READY:
            self._readmission.start()
        self._on_change()
