"""The engine: requests in, steps of the model, events out. Synchronous, single-threaded, without a clock of its own."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from worker.batch import Batch
from worker.errors import DeadlineExceeded, InvalidRequest, NumericalError, QueueFull, RequestAborted, WorkerError
from worker.kv_cache import KVCache
from worker.live_request import Choice, Decode, LiveRequest
from worker.load import EngineInfo, GraphSnapshot, LoadSnapshot
from worker.meter import StepMeter
from worker.pending import PendingStep
from worker.request import (
    ChoiceDelta,
    EngineEvent,
    GenerateRequest,
    Phase,
    RequestFailed,
    RequestPhase,
)
from worker.request_check import check_request
from worker.runner import Runner
from worker.scheduler import Scheduler
from worker.sequence import Sequence, SequenceState
from worker.step_output import StepOutput
from worker.weight_check import WeightCheck

Hold = Callable[[int], float]
"""Seconds that the tokens of an answer may be held back to be handed out together, with so many live requests."""


def hold_nothing(num_live: int) -> float:  # noqa: ARG001
    """Every step hands out what it brings."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    info: EngineInfo
    scheduler: Scheduler
    runner: Runner
    kv_cache: KVCache
    decode: Decode | None
    """None when the model has no tokenizer: answers are then token ids alone."""
    clock: Callable[[], float]
    """Monotonic seconds; request deadlines are on it."""
    hold_s: Hold = hold_nothing
    """How long tokens are held back. The first token of a choice and its end are handed out at once."""
    weight_check: WeightCheck | None = None
    """None: nobody looks whether the weights change."""


class Engine:
    """Owns every request from `add` to its last event."""

    def __init__(self, parts: EngineParts) -> None:
        self.info = parts.info
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.kv_cache = parts.kv_cache
        self.meter = StepMeter()
        self._decode = parts.decode
        self._clock = parts.clock
        self._live: dict[str, LiveRequest] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._hold_s = parts.hold_s
        self._weight_check = parts.weight_check
        self._tick_s = 0.0
        self._earliest_deadline_s = math.inf
        self._under_way: deque[_Step] = deque()
        self._has_trial_begun = False
        self.phases: list[RequestPhase] | None = None
        """Where a host that wants to know how far requests are finds it; it empties the list."""
        self.notice: threading.Event | None = None
        """What the next step is to wait for: a phase of a trial, just handed out, that must be known first."""
        self._collected_s = 0.0
        self.num_wasted_rows = 0
        """Rows computed for sequences that had ended by the time their token was read."""

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do."""
        return self.scheduler.has_work or bool(self._under_way)

    @property
    def live_request_ids(self) -> Collection[str]:
        """Requests that have not ended."""
        return self._live.keys()

    def add(self, request: GenerateRequest) -> list[EngineEvent]:
        """Queue a request. Raises InvalidRequest or QueueFull, and then nothing is kept of it.

        Returns the ends of choices that what was delivered of them completes, and of less critical requests that made
        room for it.
        """
        check_request(request, self.info)
        return self.take(request)

    def take(self, request: GenerateRequest) -> list[EngineEvent]:
        """`add` for a request that `check_request` has passed already, on another thread."""
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        now_s = self._clock()
        live = LiveRequest(request, self.info.max_model_len, now_s, self._decode, self.info.eos_token_ids)
        ends = live.restore(now_s)
        shed = self._shed_for(request, len(live.unfinished))
        self.scheduler.add(
            [choice.sequence for choice in live.unfinished], is_first=request.is_trial, has_begun=request.is_moved
        )
        if not live.is_finished:
            self._live[request.request_id] = live
            self._choices |= {choice.sequence: choice for choice in live.unfinished}
            if request.deadline_s is not None:
                self._earliest_deadline_s = min(self._earliest_deadline_s, request.deadline_s)
        return [*shed, *ends]

    def _shed_for(self, request: GenerateRequest, num_sequences: int) -> list[EngineEvent]:
        """End less critical requests, if that makes room for this one."""
        full = QueueFull(len(self.scheduler.waiting), self.scheduler.max_waiting)
        shed = self.scheduler.to_shed(request.criticality, num_sequences)
        return [event for one in shed for event in self._fail(one.request_id, full)]

    def cancel(self, request_id: str) -> list[EngineEvent]:
        """End a request now; its rows and blocks are free at once. Unknown ids change nothing."""
        if request_id not in self._live:
            return []
        return self._fail(request_id, RequestAborted("the request was cancelled"))

    def fail_all(self, error: WorkerError) -> list[EngineEvent]:
        """End every request with `error`."""
        return [event for request_id in list(self._live) for event in self._fail(request_id, error)]

    def plan(self) -> tuple[list[EngineEvent], Batch | None]:
        """End what is past its deadline, then choose the next step."""
        now_s = self._clock()
        events = self._expire(now_s) if now_s >= self._earliest_deadline_s else []
        batch = self.scheduler.schedule()
        if batch is not None:
            for segment in batch.segments:
                if segment.sequence.first_scheduled_s is None:
                    segment.sequence.first_scheduled_s = now_s
                    self._tell(RequestPhase(segment.sequence.request.request_id, Phase.SCHEDULED))
        return events, batch

    def launch(self, batch: Batch) -> None:
        """Start a planned step. Its tokens come with `collect`."""
        launched_s = self._clock()  # before the launch, which on the CPU is the step itself
        self._under_way.append(_Step(batch, self.runner.launch(batch), launched_s))
        for segment in batch.segments:
            segment.sequence.num_computed = segment.end
            segment.sequence.num_in_flight += segment.samples

    def collect(self) -> list[EngineEvent]:
        """Wait for the oldest step under way and hand out what it brought."""
        step = self._under_way.popleft()
        output = step.pending.result()
        now_s = self._clock()
        # Steps overlap: one that was launched early has only run since the one before it ended.
        self.meter.record(step.batch, output.runner, now_s - max(step.launched_s, self._collected_s))
        self._collected_s = now_s
        return self._commit(step.batch, output, now_s)

    def flush(self) -> list[EngineEvent]:
        """Collect every step under way."""
        events: list[EngineEvent] = []
        while self._under_way:
            events += self.collect()
        return events

    def step(self) -> list[EngineEvent]:
        """Launch the next step, and collect what is due: with nothing to launch, or more under way than may be."""
        events, batch = self.plan()
        if self.scheduler.trial is not None:
            return events + self._step_trial(self.scheduler.trial, batch)
        if batch is not None and self._under_way and not self.runner.can_overlap(batch):
            events += self.flush()
            more, batch = self.plan()
            events += more
        if batch is not None:
            self.launch(batch)
            if not self.runner.can_overlap(batch):
                return events + self.flush()
        limit = self.runner.max_ahead if batch is not None else 0
        while len(self._under_way) > limit:
            events += self.collect()
        return events

    @property
    def is_trying(self) -> bool:
        """Whether steps compute one suspect alone: nothing else is to be run beside them."""
        return self.scheduler.trial is not None

    def _step_trial(self, trial: GenerateRequest, batch: Batch | None) -> list[EngineEvent]:
        """A step of one suspect alone. Its trial's beginning and end are steps of their own, in which nothing runs."""
        events = self.flush()
        if not self._has_trial_begun and not self.scheduler.is_trial_over:
            self._has_trial_begun = True
            self._notify(trial, Phase.TRIAL_BEGAN)
            return events
        if batch is not None and not self.scheduler.is_trial_over:
            self.launch(batch)
            events += self.flush()
        if self.scheduler.is_trial_over:
            self.scheduler.end_trial()
            if self._has_trial_begun:
                self._notify(trial, Phase.TRIAL_PASSED)
            self._has_trial_begun = False
        return events

    def _notify(self, trial: GenerateRequest, phase: Phase) -> None:
        if self.phases is not None:
            self.notice = threading.Event()
        self._tell(RequestPhase(trial.request_id, phase, self.notice))

    def _tell(self, phase: RequestPhase) -> None:
        if self.phases is not None:
            self.phases.append(phase)

    def prepare_next(self) -> bool:
        """Do one piece of the runner's preparation, such as capturing a graph; False when it is all done.

        No step may be under way.
        """
        assert not self._under_way, "flush before preparing"
        return self.runner.prepare_next()

    def check_weights(self) -> None:
        """Look at some of the weights between two steps, if it is time to. Raises WeightsCorrupted; waits for nothing."""
        if self._weight_check is not None:
            self._weight_check.advance(has_work=self.has_work)

    @property
    def weights_due_in_s(self) -> float:
        """How long `check_weights` would find nothing to do."""
        return math.inf if self._weight_check is None else self._weight_check.due_in_s(has_work=self.has_work)

    def predict_s(self) -> float | None:
        """How long one `step` may take; None before the first."""
        return self.meter.predict_s(self.scheduler.prefill_buckets.largest)

    def load(self) -> LoadSnapshot:
        """What the engine holds right now; what its graphs have done is left to `graph_snapshot`, which costs more."""
        now_s, scheduler, cache = self._clock(), self.scheduler, self.scheduler.prefix_cache
        load = self.meter.snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            max_rows=scheduler.buckets.largest,
            waiting_prefill_tokens=scheduler.num_prefill_tokens,
            predicted_step_s=self.predict_s(),
            outstanding_tokens=sum(sequence.outstanding_tokens for sequence in scheduler.sequences()),
            tiers=scheduler.tier_loads(),
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.num_usable,
            readiness=self.runner.readiness,
            preemptions=scheduler.num_preemptions,
            wasted_rows=self.num_wasted_rows,
            prefix_cache_queries=0 if cache is None else cache.num_queried_tokens,
            prefix_cache_hits=0 if cache is None else cache.num_hit_tokens,
            queue_age_s=now_s - min((sequence.arrival_s for sequence in scheduler.waiting), default=now_s),
        )
        return load if self._weight_check is None else replace(load, weights=self._weight_check.snapshot())

    def graph_snapshot(self) -> GraphSnapshot:
        """What the runner's graphs have done so far."""
        return self.runner.graph_snapshot()

    def _expire(self, now_s: float) -> list[EngineEvent]:
        """End what is past its deadline."""
        events: list[EngineEvent] = []
        self._earliest_deadline_s = math.inf
        for request_id, live in list(self._live.items()):
            deadline_s = live.request.deadline_s
            if deadline_s is None:
                continue
            if now_s >= deadline_s:
                error = DeadlineExceeded("the deadline passed before the answer was complete")
                events += self._fail(request_id, error)
            else:
                self._earliest_deadline_s = min(self._earliest_deadline_s, deadline_s)
        return events

    def _commit(self, batch: Batch, output: StepOutput, now_s: float) -> list[EngineEvent]:
        """Append each row's token; hand out what is urgent or due. One pass over the rows, as short as it can be."""
        events: list[EngineEvent] = []
        finished, choices = SequenceState.FINISHED, self._choices
        rows = zip(batch.sampling, output.token_ids, output.is_finite, output.logprobs, strict=True)
        for segment, token_id, is_finite, logprob in rows:
            sequence = segment.sequence
            sequence.num_in_flight -= 1
            if sequence.state is finished:
                self.num_wasted_rows += 1
                continue
            if not is_finite:
                error = NumericalError("the model produced NaN or infinity for this request")
                events += self._fail(sequence.request.request_id, error, scrub=True)
                continue
            if segment.start + segment.count >= sequence.confirm_from:
                self.scheduler.confirm(segment)
            choice = choices[sequence]
            has_ended = choice.take(token_id, logprob)
            if has_ended or sequence.first_token_s is None:
                events.append(self._hand_out(choice, batch, output.runner, now_s))
                if has_ended:
                    self._finish(self._live[sequence.request.request_id], sequence)
        if now_s >= self._tick_s:
            events += self._hand_out_due(batch, output.runner, now_s)
        return events

    def _hand_out_due(self, batch: Batch, runner: str, now_s: float) -> list[EngineEvent]:
        """What has been held back for long enough. Looked for at most once in the time a single answer is held."""
        self._tick_s = now_s + self._hold_s(1)
        return [
            self._hand_out(choice, batch, runner, now_s)
            for choice in self._choices.values()
            if choice.due_s <= now_s and choice.num_unsent
        ]

    def _hand_out(self, choice: Choice, batch: Batch, runner: str, now_s: float) -> ChoiceDelta:
        if choice.sequence.first_token_s is None:
            choice.sequence.first_token_s = now_s
        choice.due_s = now_s + self._hold_s(len(self._live))
        return choice.delta(tier=batch.tier, bucket=batch.bucket, runner=runner, now_s=now_s)

    def _finish(self, live: LiveRequest, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.meter.finish(sequence.num_generated)
        del self._choices[sequence]
        if live.is_finished:
            del self._live[live.request.request_id]

    def _fail(self, request_id: str, error: WorkerError, *, scrub: bool = False) -> list[EngineEvent]:
        """End a request with what it has so far, and its error."""
        live = self._live.pop(request_id)
        unfinished = live.unfinished
        events: list[EngineEvent] = [choice.rest() for choice in unfinished if choice.num_unsent]
        sequences = [choice.sequence for choice in unfinished]
        if scrub:
            # What others hold is not scrubbed: it was shared because finite tokens had come of it.
            self.kv_cache.scrub(self.scheduler.finish_spoilt(sequences))
        for sequence in sequences:
            self.scheduler.finish(sequence)
            del self._choices[sequence]
        return [*events, RequestFailed(request_id, error)]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way."""

    batch: Batch
    pending: PendingStep
    launched_s: float
