"""A Backend over one engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import grpc

from cluster import status
from cluster.answers import load_to_proto, model_to_proto
from cluster.codec import AnyRequest, cache_options, check_defaults, messages_from_proto, sampling_from_proto
from cluster.criticality import current_criticality
from cluster.delivered import Delivered
from cluster.errors import NotReady, SlowReader, UnknownModel, UnknownReplica
from cluster.metrics.answer_times import AnswerTimes
from cluster.metrics.replica import ReplicaMetrics
from cluster.replica.direct import DirectOutbox
from cluster.replica.events import EventFanout
from cluster.replica.flush import FlushPolicy
from cluster.replica.lifecycle import Lifecycle, State
from cluster.replica.live_request import NOTHING, LiveRequest, Origin, Outbox
from cluster.replica.text import Texts
from cluster.tracing import current_trace_parent, record_stages
from cluster.waiting import happens_within
from protos import control_pb2, generation_pb2
from worker.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    RequestAborted,
    WorkerError,
)
from worker.request import EngineEvent, GenerateRequest, RequestFailed, RequestPhase
from worker.sampling import check_token_ids
from worker.service import EngineService

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 3 * 1024 * 1024
"""Of one answer, waiting to be sent: past it, its reader is too slow. It must fit a message beside FRAME_BYTES."""
LAST_WORDS_S = 1.0
"""After a drain's grace: for the errors of what was cut off to reach their clients."""


class EngineBackend:
    """Submits requests to the engine and hands its events to the outboxes they belong to. Lives on one event loop."""

    def __init__(
        self,
        engine: EngineService,
        texts: Texts,
        *,
        lifecycle: Lifecycle,
        flush: FlushPolicy,
        generation_defaults: Mapping[str, Any],
        server_info: Callable[[], control_pb2.ServerInfo],
    ) -> None:
        self.engine = engine
        self.lifecycle = lifecycle
        self.flush = flush
        self.metrics = ReplicaMetrics()
        self.name = ""
        self.address = ""
        self.on_engine_dead: Callable[[WorkerError], None] | None = None
        self.failure: WorkerError | None = None
        """What ended the engine."""
        self._texts = texts
        self._defaults = check_defaults(generation_defaults)
        self._server_info = server_info
        self._running: dict[str, LiveRequest] = {}
        self._open: set[LiveRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._numbers = itertools.count()

    @property
    def num_live(self) -> int:
        """Requests whose last piece is not on its way yet."""
        return len(self._open)

    def connect(self, events: EventFanout) -> None:
        """Take the engine's events from now on; call on the event loop that serves."""
        events.connect(asyncio.get_running_loop(), self._receive)

    async def open(
        self, request: AnyRequest, *, timeout_s: float | None, outbox: Outbox, origin: Origin
    ) -> LiveRequest:
        """Start a request whose pieces go to `outbox`. Raises what the engine refuses it with."""
        times = AnswerTimes()
        try:
            return await self._open_request(request, timeout_s, outbox, origin, times)
        except Exception as error:
            self.metrics.ended(status.code_of(error))
            raise
        except asyncio.CancelledError:
            self.metrics.ended(grpc.StatusCode.CANCELLED)
            raise

    async def _open_request(
        self, request: AnyRequest, timeout_s: float | None, outbox: Outbox, origin: Origin, times: AnswerTimes
    ) -> LiveRequest:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._check_open()
        self._check_model(request.model)
        sampling = sampling_from_proto(request.sampling, self._defaults)
        prompt = await self._texts.prompt(request)
        # A text may have been on its thread for a while.
        self._check_open()
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise DeadlineExceeded
        engine_id = f"{request.request_id}/{next(self._numbers)}"
        live = LiveRequest(
            request_id=request.request_id,
            engine_id=engine_id,
            num_choices=sampling.n,
            num_prompt=len(prompt),
            origin=origin,
            outbox=outbox,
            times=times,
        )
        live.trace_parent = current_trace_parent()
        work = GenerateRequest(
            request_id=engine_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=deadline_s,
            criticality=current_criticality(),
            delivered=origin.delivered.by_choice,
            finished=frozenset(origin.delivered.finished),
            is_trial=origin.trial_tokens > 0,
            trial_tokens=origin.trial_tokens,
            is_moved=origin.is_moved,
            **cache_options(request),
        )
        if not live.has_ended:
            try:
                self.engine.submit(work)
            except InvalidRequest as error:
                raise _named_as_sent(error, request) from error
            self._running[engine_id] = live
        self._open.add(live)
        self._idle.clear()
        if live.has_ended:  # all was delivered but the last message
            live.is_urgent = True
            outbox.touch(live)
            outbox.settle()
        return live

    def take(self, live: LiveRequest) -> generation_pb2.GenerateResponse | None:
        """The piece of a request that is due, if there is one; it counts as sent."""
        piece = live.take()
        if piece is not None:
            self.metrics.sent(live.times, piece)
        return piece

    def close(self, live: LiveRequest) -> None:
        """Forget a request; if it is still running, it ends here."""
        if live in self._open:
            self.metrics.ended(_code(live), live.timings)
            if live.timings is not None:
                record_stages(live.trace_parent, live.timings, replica=self.name, num_tokens=live.num_completion_tokens)
        if self._running.pop(live.engine_id, None) is not None and not live.has_ended:
            self.engine.cancel(live.engine_id)
        self._open.discard(live)
        if not self._open:
            self._idle.set()

    async def generate(
        self, request: AnyRequest, *, timeout_s: float | None, delivered: Delivered | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """See Backend."""
        started_s = time.monotonic()
        outbox = DirectOutbox(self.flush.interval(len(self._open) + 1))
        live = await self.open(
            request, timeout_s=timeout_s, outbox=outbox, origin=Origin(self.name, delivered=delivered or NOTHING)
        )
        try:
            has_ended = False
            while not has_ended:
                await outbox.due()
                piece, has_ended = self.take(live), live.has_ended
                if piece is None:
                    continue
                if piece.HasField("timings"):
                    piece.timings.total_ms = 1000 * (time.monotonic() - started_s)
                yield piece
            if live.error is not None:
                raise live.error
        finally:
            outbox.reset()
            self.close(live)

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.TokenizeResponse:
        """See Backend."""
        self._check_model(request.model)
        async with asyncio.timeout(timeout_s):
            kind = request.WhichOneof("input")
            if kind is None:
                raise InvalidRequest("input", "neither text nor messages is given")
            if kind == "text":
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._texts.encode(request.text, add_special_tokens=special)
            else:
                ids = await self._texts.render(messages_from_proto(request.messages.messages))
        return generation_pb2.TokenizeResponse(token_ids=ids, max_model_len=self.engine.info.max_model_len)

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.DetokenizeResponse:
        """See Backend."""
        self._check_model(request.model)
        check_token_ids("token_ids", request.token_ids, self.engine.info.vocab_size)
        async with asyncio.timeout(timeout_s):
            text = await self._texts.decode(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
        return generation_pb2.DetokenizeResponse(text=text)

    async def model_info(self, model: str) -> control_pb2.ModelInfo:
        """See Backend."""
        self._check_model(model)
        return model_to_proto(self.engine.info)

    def server_info(self) -> control_pb2.ServerInfo:
        """See Backend."""
        return self._server_info()

    def load(self) -> control_pb2.Load:
        """The engine's load, as it goes to routers."""
        return load_to_proto(self.engine.load())

    def loads(self) -> Sequence[control_pb2.ReplicaLoad]:
        """See Backend."""
        return [
            control_pb2.ReplicaLoad(
                replica=self.name,
                address=self.address,
                incarnation=self._server_info().id,
                state=self.lifecycle.state.value,
                load=self.load(),
            )
        ]

    def held(self) -> Sequence[control_pb2.HeldRequests]:
        """See Backend: a replica's queue is part of its load."""
        return ()

    async def drain(self, replica: str, *, grace_s: float) -> None:
        """See Backend. What is not finished after the grace ends with Draining; then the replica is STOPPED."""
        if replica not in ("", self.name):
            raise UnknownReplica(replica)
        self.lifecycle.advance(State.DRAINING)
        self.engine.drain()
        if not await self.wait_idle(grace_s):
            log.warning("%d requests were cut off after a grace of %.1f s", len(self._open), grace_s)
            self.fail_all(Draining())
            await self.wait_idle(LAST_WORDS_S)
        self.lifecycle.advance(State.STOPPED)

    def abort(self, request_id: str) -> bool:
        """See Backend."""
        found = [live for live in self._running.values() if live.request_id == request_id]
        self._fail(found, RequestAborted())
        return bool(found)

    def fail_all(self, error: WorkerError) -> None:
        """End every running request with this error."""
        self._fail(list(self._running.values()), error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the last piece of every request is on its way; False when that took too long."""
        return await happens_within(self._idle, timeout_s)

    def _receive(self, events: Sequence[EngineEvent]) -> None:
        """One step's events, on the event loop."""
        outboxes: dict[Outbox, None] = {}
        for event in events:
            live = self._running.get(event.request_id)
            if live is None:
                if isinstance(event, RequestPhase) and event.seen is not None:
                    event.seen.set()  # nobody is left to know it
                continue
            live.add(event)
            if live.pending_bytes > MAX_PENDING_BYTES:
                self._fail([live], SlowReader(MAX_PENDING_BYTES, "bytes"))
            if live.has_ended:
                self._running.pop(event.request_id, None)
            live.outbox.touch(live)
            outboxes[live.outbox] = None
            if isinstance(event, RequestFailed) and isinstance(event.error, EngineDead) and self.on_engine_dead:
                self.on_engine_dead(event.error)
        for outbox in outboxes:
            outbox.settle()

    def _fail(self, lives: Sequence[LiveRequest], error: Exception) -> None:
        for live in lives:
            self._running.pop(live.engine_id, None)
            self.engine.cancel(live.engine_id)
            live.fail(error)
            live.outbox.touch(live)
            live.outbox.settle()

    def _check_open(self) -> None:
        state = self.lifecycle.state
        if state is State.READY:
            return
        if state is State.STARTING:
            raise NotReady("starting")
        raise EngineDead if state is State.FAILED else Draining

    def _check_model(self, name: str) -> None:
        if name not in ("", self.engine.info.model):
            raise UnknownModel(self.engine.info.model)


def _code(live: LiveRequest) -> grpc.StatusCode:
    if live.error is not None:
        return status.code_of(live.error)
    return grpc.StatusCode.OK if live.has_ended else grpc.StatusCode.CANCELLED


def _named_as_sent(error: InvalidRequest, request: AnyRequest) -> InvalidRequest:
    """An engine knows a prompt only as ids; the client is told the field that it filled."""
    if error.field not in ("prompt", "prompt_token_ids"):
        return error
    if isinstance(request, generation_pb2.ChatRequest):
        return InvalidRequest("messages", error.problem)
    return InvalidRequest(request.WhichOneof("prompt") or "prompt", error.problem)
