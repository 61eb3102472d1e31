"""One router's stream: requests come in, packed frames go out."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError

from cluster import status
from cluster.config import ReplicaConfig
from cluster.criticality import criticality_from_proto, use_criticality
from cluster.delivered import Delivered
from cluster.errors import MalformedMessage, SlowReader
from cluster.handlers import Context
from cluster.replica.attached import AttachedRouters
from cluster.replica.engine_backend import EngineBackend
from cluster.replica.lifecycle import State
from cluster.replica.live_request import LiveRequest, Origin
from cluster.tracing import use_trace_parent
from protos import replica_pb2
from worker.errors import Draining
from worker.request import Phase

PHASES = {
    Phase.SCHEDULED: replica_pb2.STREAM_PHASE_SCHEDULED,
    Phase.TRIAL_BEGAN: replica_pb2.STREAM_PHASE_TRIAL_BEGAN,
    Phase.TRIAL_PASSED: replica_pb2.STREAM_PHASE_TRIAL_PASSED,
}
MIN_TRIAL_TOKENS = 2
FRAME_BYTES = 512 * 1024
"""A frame takes no further answers past this."""
LINGER_S = 1.0
"""From telling a router that it is left to ending its stream, at least: requests may be on their way."""
LAST_WRITE_S = 0.5
"""What a frame that is being written at the end may take."""

log = logging.getLogger(__name__)


class AttachSession:
    """Carries the requests of one router: an Outbox that sends all their pieces through one stream.

    While a frame is being written the next one gathers, so a slow router gets fewer, fuller frames. One that does not
    read at all is given up: `run` then raises SlowReader, and its requests end.
    """

    def __init__(
        self,
        backend: EngineBackend,
        config: ReplicaConfig,
        hello: replica_pb2.ReplicaHello,
        *,
        routers: AttachedRouters | None = None,
        on_answered: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_answered` is told the router's name when a whole answer has gone out, such as that to the canary."""
        self.router = ""
        """The router's name; "" until it has said it."""
        self._on_answered = on_answered
        self._routers = AttachedRouters() if routers is None else routers
        self._dismissed_s: float | None = None
        self._verdicts: dict[bytes, float] = {}
        self._backend = backend
        self._config = config
        self._hello: replica_pb2.ReplicaHello | None = hello
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, LiveRequest] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._dirty: dict[LiveRequest, None] = {}
        self._urgent: dict[LiveRequest, None] = {}
        self._refused: list[replica_pb2.StreamEvent] = []
        self._unseen: dict[int, threading.Event] = {}
        """By stream, of a phase that the router has not noted yet."""
        self._wake = asyncio.Event()
        self._num_heard = 0
        self._is_load_due = self._is_state_due = True
        self._is_flush_due = self._is_ending = False
        self._flush_timer: asyncio.TimerHandle | None = None
        self._writing_since_s: float | None = None
        self._written: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, context: Context) -> None:
        """Serve until the router hangs up. Raises SlowReader or MalformedMessage if it misbehaves."""
        tasks = [asyncio.create_task(work) for work in (self._read(context), self._write(context), self._tick())]
        unsubscribe = self._backend.lifecycle.subscribe(self._state_changed)
        self._routers.add(self)
        try:
            await asyncio.wait((*tasks, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            unsubscribe()
            self._routers.discard(self)
            self._close()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if self._written is not None:
                await asyncio.wait((self._written,), timeout=LAST_WRITE_S)
        if self._over.done():
            self._over.result()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def hang_up(self) -> None:
        """Send what there is and end."""
        self._is_ending = True
        self._wake.set()

    def dismiss(self) -> None:
        """See RouterSession."""
        if self._dismissed_s is None:
            log.info("router %.64r is none of this replica's any more", self.router)
            self._dismissed_s = time.monotonic()
            self._state_changed()

    def readmit(self) -> None:
        """See RouterSession."""
        self._dismissed_s = None
        self._state_changed()

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        """See RouterSession."""
        self._verdicts.update(verdicts)
        self._wake.set()

    def touch(self, live: LiveRequest) -> None:
        """See Outbox."""
        self._dirty[live] = None
        if live.is_urgent:
            self._urgent[live] = None

    def settle(self) -> None:
        """See Outbox."""
        if self._urgent:
            self._wake.set()
        if self._flush_timer is not None or self._is_flush_due or len(self._dirty) == len(self._urgent):
            return
        interval_s = self._backend.flush.interval(len(self._streams))
        if interval_s == 0:
            self._flush()
        else:
            self._flush_timer = self._loop.call_later(interval_s, self._flush)

    async def _read(self, context: Context) -> None:
        while (frame := await _next_frame_of(context)) is not None:
            self._num_heard += 1
            kind = frame.WhichOneof("kind")
            if kind == "submit":
                await self._submit(frame.submit)
            elif kind == "cancel":
                self._cancel(frame.cancel.stream_id)
            elif kind == "trial_noted":
                self._note_seen(frame.trial_noted.stream_id)
            elif kind == "poison":
                self._routers.note_verdict(self, frame.poison.fingerprint, frame.poison.ttl_s)
            elif kind == "hello":
                self.router = frame.hello.router
                log.info("router %.64r is attached", frame.hello.router)
                self._routers.note_name(self)

    async def _write(self, context: Context) -> None:
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, ended = self._next_frame()
            self._writing_since_s = time.monotonic()
            self._written = asyncio.ensure_future(context.write(frame))
            self._written.add_done_callback(_note_failure)
            # A write goes on in gRPC when its task is cancelled, and no status can be sent before it has ended.
            try:
                await asyncio.shield(self._written)
            finally:
                # Also when the router hangs up meanwhile: a drain would wait for them in vain.
                for live in ended:
                    self._backend.close(live)
            if any(live.error is None for live in ended):
                self._on_answered(self.router)
            self._writing_since_s = None
            if self._is_ending and not self._dirty and not self._wake.is_set():
                return

    async def _tick(self) -> None:
        """Reports the load, and gives a router up that lets too much wait for too long."""
        while not self._over.done():
            await asyncio.sleep(self._config.load_period_s)
            self._is_load_due = True
            self._wake.set()
            if self._is_through:
                self.hang_up()
            if sum(live.pending_bytes for live in self._dirty) > self._config.max_pending_bytes:
                self._give_up(SlowReader(self._config.max_pending_bytes, "bytes"))
            since_s = self._writing_since_s
            if since_s is not None and time.monotonic() - since_s > self._config.write_timeout_s:
                self._give_up(SlowReader(round(1000 * self._config.write_timeout_s), "milliseconds"))

    async def _submit(self, submit: replica_pb2.Submit) -> None:
        stream_id = submit.stream_id
        if stream_id in self._streams or stream_id in self._starting or submit.WhichOneof("request") is None:
            self._give_up(MalformedMessage("Submit"))
            return
        if submit.ByteSize() <= self._config.inline_text_bytes:
            # Nothing in it waits: a task would only cost the first token a turn of the event loop.
            await self._open(submit)
        else:
            self._starting[stream_id] = self._loop.create_task(self._open(submit))

    async def _open(self, submit: replica_pb2.Submit) -> None:
        stream_id = submit.stream_id
        request = submit.generate if submit.WhichOneof("request") == "generate" else submit.chat
        use_criticality(criticality_from_proto(submit.criticality))
        use_trace_parent(submit.trace_parent)
        try:
            if self._dismissed_s is not None:
                raise Draining
            delivered = Delivered.from_proto(submit.delivered, submit.next_sequence)
            trial_tokens = max(submit.trial_tokens, MIN_TRIAL_TOKENS) if submit.is_trial else 0
            origin = Origin(
                self._backend.name, submit.attempt, stream_id, delivered, trial_tokens, is_moved=submit.is_moved
            )
            live = await self._backend.open(request, timeout_s=submit.timeout_s or None, outbox=self, origin=origin)
        except Exception as error:  # noqa: BLE001  # whatever it is ends this request alone, with its status
            self._refused.append(
                replica_pb2.StreamEvent(stream_id=stream_id, error=status.stream_error(error), end=True)
            )
            self._wake.set()
        else:
            self._streams[stream_id] = live
        finally:
            self._starting.pop(stream_id, None)

    def _cancel(self, stream_id: int) -> None:
        """Unknown ids are streams whose end crossed the cancellation."""
        starting = self._starting.pop(stream_id, None)
        if starting is not None:
            starting.cancel()
        live = self._streams.pop(stream_id, None)
        if live is not None:
            self._dirty.pop(live, None)
            self._urgent.pop(live, None)
            self._backend.close(live)
        self._note_seen(stream_id)

    def _next_frame(self) -> tuple[replica_pb2.ReplicaFrame, list[LiveRequest]]:
        """Whatever is due, and the requests that end with it."""
        frame = replica_pb2.ReplicaFrame(events=self._refused, frames_heard=self._num_heard)
        self._refused.clear()
        if self._hello is not None:
            frame.hello.CopyFrom(self._hello)
            self._hello = None
        if self._is_state_due:
            frame.state = self._state.value
            if self._backend.failure is not None:
                frame.failed_with = status.code_of(self._backend.failure).value[0]
        frame.poisons.extend(
            replica_pb2.PoisonVerdict(fingerprint=fingerprint, ttl_s=ttl_s)
            for fingerprint, ttl_s in self._verdicts.items()
        )
        self._verdicts.clear()
        ended = self._pack_answers(frame)
        if self._is_load_due:
            frame.load.CopyFrom(self._backend.load())
            frame.num_routers = self._routers.count
        self._is_state_due = self._is_load_due = False
        return frame, ended

    @property
    def _state(self) -> State:
        """The replica's, as this router is to treat it."""
        state = self._backend.lifecycle.state
        return State.DRAINING if self._dismissed_s is not None and state is State.READY else state

    @property
    def _is_through(self) -> bool:
        """Whether a router that was left has had all it asked for, and whatever it sent before it knew has arrived."""
        if self._dismissed_s is None or time.monotonic() - self._dismissed_s < LINGER_S:
            return False
        return not (self._streams or self._starting or self._dirty or self._refused)

    def _pack_answers(self, frame: replica_pb2.ReplicaFrame) -> list[LiveRequest]:
        due = tuple(self._dirty if self._is_flush_due else self._urgent)
        self._is_flush_due = False
        ended: list[LiveRequest] = []
        size = 0
        for live in due:
            if size > FRAME_BYTES:
                self._flush()
                break
            size += live.pending_bytes
            self._pack(frame, live)
            if live.has_ended:
                ended.append(live)
                self._streams.pop(live.origin.stream_id, None)
        return ended

    def _pack(self, frame: replica_pb2.ReplicaFrame, live: LiveRequest) -> None:
        del self._dirty[live]
        self._urgent.pop(live, None)
        stream_id = live.origin.stream_id
        piece = self._backend.take(live)
        for phase in live.take_phases():
            if phase.seen is not None:
                self._unseen[stream_id] = phase.seen
            elif piece is not None:
                continue  # that it was scheduled shows in its tokens
            frame.events.add(stream_id=stream_id, phase=PHASES[phase.phase])
        if piece is not None:
            frame.events.add(stream_id=stream_id, response=piece, end=live.has_ended and live.error is None)
        if live.error is not None:
            frame.events.add(stream_id=stream_id, error=status.stream_error(live.error), end=True)

    def _note_seen(self, stream_id: int) -> None:
        seen = self._unseen.pop(stream_id, None)
        if seen is not None:
            seen.set()

    def _flush(self) -> None:
        self._flush_timer = None
        self._is_flush_due = True
        self._wake.set()

    def _state_changed(self) -> None:
        self._is_state_due = True
        self._wake.set()

    def _give_up(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _close(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for stream_id in (*self._starting, *self._streams):
            self._cancel(stream_id)
        for live in (*self._dirty, *self._urgent):
            self._backend.close(live)
        for stream_id in tuple(self._unseen):
            self._note_seen(stream_id)


def _note_failure(written: asyncio.Future[None]) -> None:
    """That a write failed is known from the end of the stream; asyncio would complain if nobody asked."""
    if not written.cancelled():
        written.exception()


async def _next_frame_of(context: Context) -> replica_pb2.RouterFrame | None:
    """None at the end. Raises MalformedMessage for bytes that are no frame."""
    try:
        frame = await context.read()
    except DecodeError as error:
        raise MalformedMessage("RouterFrame") from error
    return frame if isinstance(frame, replica_pb2.RouterFrame) else None
