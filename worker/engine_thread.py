"""Runs an engine on a thread of its own and shows it as an EngineService."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from worker.engine import Engine
from worker.errors import Draining, EngineDead, QueueFull, WorkerError
from worker.load import EngineInfo, LoadSnapshot
from worker.policy import may_prepare
from worker.progress import ProgressWatch
from worker.request import EngineEvent, GenerateRequest, RequestFailed
from worker.request_check import check_request
from worker.service import EventSink

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
IDLE_WAIT_S = 0.25
FIRST_REQUEST_S = 2.0
"""How long a worker that has just started leaves preparation for the first request, which a router sends at once."""
LEAVING_S = 0.2
JOIN_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 0.05, 10.0
"""Bounds of when to come back to a full queue."""
NOTICE_S = 1.0
"""Longest wait for a host to pass on that a trial begins or has ended."""

Command = Callable[[], list[EngineEvent]]


class EngineThread:
    """See worker.service.EngineService for the contract of each method."""

    def __init__(
        self, engine: Engine, sink: EventSink, *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self._engine = engine
        self._phases = engine.phases = []
        self._has_waited = False
        """The phases have, for one step."""
        self._sink = sink
        self._on_death = on_death
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._progress = ProgressWatch()
        self._graphs = engine.graph_snapshot()
        self._load = replace(engine.load(), graphs=self._graphs)
        self._load_due_s = 0.0
        self._is_draining = False
        self._is_stopping = False
        self._is_prepared = False
        self._waits_until_s = time.monotonic() + FIRST_REQUEST_S
        """The first request goes before any preparation until then, or until it is answered."""
        self._prepared_s = 0.0
        self._preparing_took_s = 0.0
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="graphpool-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """See EngineService."""
        return self._engine.info

    def submit(self, request: GenerateRequest) -> None:
        """See EngineService."""
        self._check_open()
        if self._is_draining:
            raise Draining("the worker is draining")
        check_request(request, self._engine.info)
        scheduler, num_commands = self._engine.scheduler, self._commands.qsize()
        if not scheduler.may_queue(request.criticality, request.sampling.n, num_commands):
            retry_after_s = min(max(self._load.predicted_ttft_s, MIN_RETRY_S), MAX_RETRY_S)
            raise QueueFull(len(scheduler.waiting) + num_commands, scheduler.max_waiting, retry_after_s)
        self._commands.put(lambda: self._add(request))

    def cancel(self, request_id: str) -> None:
        """See EngineService."""
        self._commands.put(lambda: self._engine.cancel(request_id))

    def load(self) -> LoadSnapshot:
        """See EngineService; at most LOAD_INTERVAL_S old while steps run, and its graphs IDLE_WAIT_S more after them.

        The age of the step under way is that of this moment, so that it also grows when the step does not end.
        """
        watch = self._progress
        return replace(self._load, step_age_s=watch.age_s(time.monotonic()), is_preparing=watch.is_preparing)

    def check(self) -> None:
        """See EngineService."""
        self._check_open()
        self._progress.check(time.monotonic())

    def drain(self) -> None:
        """See EngineService."""
        self._is_draining = True

    def stop(self) -> None:
        """See EngineService."""
        self._is_stopping = True
        self._commands.put(list)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _check_open(self) -> None:
        if self._death is not None or self._is_stopping:
            raise self._end_error from self._death

    @property
    def _end_error(self) -> EngineDead:
        """What requests end with when the engine does."""
        death = self._death
        return type(death)(*death.args) if isinstance(death, EngineDead) else EngineDead("the engine has stopped")

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine thread ended with an error")
            self._death = error
        self._end()

    def _turn(self) -> None:
        """Take commands, run one step if there is anything to run, hand the events on."""
        events = self._take_commands()
        if self._engine.has_work:
            self._progress.begin(time.monotonic(), self._engine.predict_s())
            events += self._engine.step()
            self._progress.end()
        self._hand_on(events)
        self._prepare()
        if not (self._engine.is_trying or self._waits_for_first(time.monotonic())):
            self._engine.check_weights()
        self._refresh_load()

    def _prepare(self) -> None:
        """Between two steps, do a piece of what makes later ones faster, if it is time for it."""
        started_s = time.monotonic()
        since_s = started_s - self._prepared_s
        if (
            self._is_prepared
            or self._waits_for_first(started_s)
            or self._engine.is_trying
            or not may_prepare(has_work=self._engine.has_work, since_last_s=since_s, last_took_s=self._preparing_took_s)
        ):
            return
        self._progress.begin(started_s, None, is_preparing=True)
        events = self._engine.flush()
        self._is_prepared = not self._engine.prepare_next()
        self._progress.end()
        if events:
            self._sink(events)
        self._prepared_s = time.monotonic()
        self._preparing_took_s = self._prepared_s - started_s

    def _waits_for_first(self, now_s: float) -> bool:
        """A piece of preparation may take seconds, and whoever waits for a new worker waits for its first answer.

        That has to leave first, too: building kernels keeps other threads from running.
        """
        if self._engine.meter.steps and not self._engine.has_work:
            self._waits_until_s = min(self._waits_until_s, now_s + LEAVING_S)
        return now_s < self._waits_until_s

    def _take_commands(self) -> list[EngineEvent]:
        """Everything queued; with nothing to do, waits for the next command."""
        events: list[EngineEvent] = []
        try:
            if not self._engine.has_work and (self._is_prepared or self._waits_for_first(time.monotonic())):
                events += self._commands.get(timeout=self._idle_wait_s())()
            while True:
                events += self._commands.get_nowait()()
        except Empty:
            return events

    def _idle_wait_s(self) -> float:
        """How long there is nothing to do without a command."""
        now_s = time.monotonic()
        return IDLE_WAIT_S if self._waits_for_first(now_s) else min(IDLE_WAIT_S, self._engine.weights_due_in_s)

    def between_steps(self, work: Callable[[], None]) -> None:
        """Call `work` on the engine's thread, where nothing else runs; an error in it ends the engine."""

        def command() -> list[EngineEvent]:
            work()
            return []

        self._commands.put(command)

    def _add(self, request: GenerateRequest) -> list[EngineEvent]:
        try:
            return self._engine.take(request)
        except WorkerError as error:
            return [RequestFailed(request.request_id, error)]

    def _hand_on(self, events: list[EngineEvent]) -> None:
        """Give events to the host; the next step waits until what a trial's judge must know of it is noted there.

        That a request left the queue can wait for one step, which often brings its first token: a wake-up less.
        """
        notice, self._engine.notice = self._engine.notice, None
        self._has_waited = bool(self._phases) and not (events or notice or self._has_waited)
        if not self._has_waited:
            events = [*self._phases, *events]
            self._phases.clear()
        if events:
            self._sink(events)
        if notice is not None:
            notice.wait(NOTICE_S)

    def _refresh_load(self) -> None:
        """The load after every step that leaves nothing to do; with it, less often, what the graphs have done."""
        now_s = time.monotonic()
        is_due = now_s >= self._load_due_s
        if is_due:
            self._graphs = self._engine.graph_snapshot()
            self._load_due_s = now_s + LOAD_INTERVAL_S
        if is_due or not self._engine.has_work:
            self._load = replace(self._engine.load(), graphs=self._graphs)

    def _end(self) -> None:
        """End every request, also those still in the command queue, and tell the host of a death."""
        events: list[EngineEvent] = [*self._phases]
        try:
            while True:
                events += self._commands.get_nowait()()
        except Empty:
            pass
        events += self._engine.fail_all(self._end_error)
        if events:
            self._sink(events)
        if self._death is not None and self._on_death is not None:
            self._on_death(self._death)
