"""An engine that plays a script: for testing whatever stands above an engine."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

from tests.fakes.script import CONTROL_IDS as CONTROL_IDS
from tests.fakes.script import EOS as EOS
from tests.fakes.script import TIERS as TIERS
from tests.fakes.script import VOCAB_SIZE as VOCAB_SIZE
from tests.fakes.script import ScriptText as ScriptText
from tests.fakes.script import script as script
from tests.fakes.script import script_state, script_tokens
from tests.fakes.script import script_text as script_text
from tests.fakes.script_knobs import ScriptKnobs as ScriptKnobs
from worker.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineStalled,
    InvalidRequest,
    NumericalError,
    QueueFull,
    WorkerError,
)
from worker.faults import Faults, InjectedCrash
from worker.forecast import predict_ttft_s
from worker.load import EngineInfo, GraphReadiness, LoadSnapshot, TierLoad
from worker.request import (
    ChoiceDelta,
    EngineEvent,
    FinishReason,
    GenerateRequest,
    Logprob,
    Phase,
    RequestFailed,
    RequestPhase,
    Timings,
)
from worker.request_check import check_request
from worker.service import EventSink


@dataclass(slots=True)
class _Choice:
    state: int
    length: int
    """Shortened when a stop token comes."""
    position: int = 0
    """Tokens it has, here or from elsewhere."""
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _Row:
    request: GenerateRequest
    choices: list[_Choice]
    started_s: float | None = None
    first_token_s: float | None = None
    num_steps: int = 0
    has_trial_begun: bool = False
    submitted_s: float = field(default_factory=time.monotonic)

    @property
    def position(self) -> int:
        """Tokens of the choice that has most."""
        return max(choice.position for choice in self.choices)


class ScriptEngine:
    """An EngineService on a thread of its own. Answers are `script(prompt, seed, choice)`; greedy uses seed 0.

    It ends answers at `max_tokens`, or at a stop token; stop strings are left to engines that have text. What was
    delivered elsewhere must be how the script begins. A trial has its first steps alone, like in a real engine.
    """

    def __init__(self, sink: EventSink, knobs: ScriptKnobs | None = None, *, faults: Faults | None = None) -> None:
        self.knobs = knobs or ScriptKnobs()
        self.faults = faults or Faults()
        self.cancelled: list[str] = []
        self._sink = sink
        self._lock = threading.Condition()
        self._waiting: list[_Row] = []
        self._rows: dict[str, _Row] = {}
        self._trial: _Row | None = None
        self._steps = 0
        self._num_tokens = 0
        self._answer_tokens = 0.0
        self._is_draining = self._is_stopping = False
        self._death: Exception | None = None
        self._busy_since_s: float | None = None
        self._step_s = 0.0
        self._thread = threading.Thread(target=self._run, name="script-engine", daemon=True)
        self._start()

    @property
    def info(self) -> EngineInfo:
        knobs = self.knobs
        return EngineInfo(
            model=knobs.model,
            architecture="script",
            max_model_len=knobs.max_model_len,
            vocab_size=knobs.vocab_size,
            eos_token_ids=(EOS,),
            tiers=(*TIERS[:3], knobs.max_model_len),
            buckets=(1, 8, knobs.max_rows),
            dtype="none",
            device="cpu",
            has_tokenizer=knobs.has_tokenizer,
            has_chat_template=knobs.has_chat_template,
        )

    def submit(self, request: GenerateRequest) -> None:
        if self._death is not None or self._is_stopping:
            raise EngineDead("the script is over")
        if self._is_draining:
            raise Draining
        check_request(request, self.info)
        with self._lock:
            if len(self._waiting) >= self.knobs.max_waiting:
                raise QueueFull(len(self._waiting), self.knobs.max_waiting, retry_after_s=0.05)
            self._waiting.append(_Row(request, _choices(request, self.info)))
            # Trials first, then what was under way elsewhere, as in a real engine.
            self._waiting.sort(key=lambda row: (not row.request.is_trial, not row.request.is_moved))
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            self._rows.pop(request_id, None)
            self._waiting = [row for row in self._waiting if row.request.request_id != request_id]

    def load(self) -> LoadSnapshot:
        with self._lock:
            rows, waiting = list(self._rows.values()), list(self._waiting)
        left = [max(0, one.length - one.position) for row in (*rows, *waiting) for one in row.choices]
        free = self.knobs.max_rows - len(rows)
        now_s, busy_since_s = time.monotonic(), self._busy_since_s
        step_s = max(self.knobs.step_s, self._step_s)
        return LoadSnapshot(
            running=len(rows),
            waiting=len(waiting),
            outstanding_tokens=sum(left) + sum(len(row.request.prompt_token_ids) for row in waiting),
            tiers=tuple(TierLoad(tier, 0, free) for tier in self.info.tiers),
            free_blocks=16 * free,
            total_blocks=16 * self.knobs.max_rows,
            queue_age_s=max((time.monotonic() - row.submitted_s for row in waiting), default=0.0),
            steps=self._steps,
            step_ms=1000 * step_s,
            eager_steps=self._steps,
            readiness=GraphReadiness(self.knobs.readiness),
            max_rows=self.knobs.max_rows,
            predicted_ttft_s=predict_ttft_s(
                num_ahead=len(waiting),
                num_free_rows=free,
                max_rows=self.knobs.max_rows,
                prefill_tokens=0,
                prefill_token_s=0.0,
                decode_step_s=step_s,
                answer_tokens=self._answer_tokens / self.knobs.tokens_per_step,
            ),
            step_age_s=0.0 if busy_since_s is None else now_s - busy_since_s,
            predicted_step_s=self.knobs.step_s,
            is_preparing=self.knobs.is_preparing,
        )

    def check(self) -> None:
        if self._death is not None or self._is_stopping:
            raise EngineDead("the script is over")
        since_s = self._busy_since_s
        if since_s is not None and time.monotonic() - since_s > max(self.knobs.stall_s, 4 * self.knobs.step_s):
            raise EngineStalled("the step does not end")

    def drain(self) -> None:
        self._is_draining = True

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    @property
    def _is_hanging(self) -> bool:
        limit = self.knobs.hang_after_steps
        return self.knobs.is_hanging or (limit is not None and self._steps >= limit)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if self._wait_for_work():
                    self._step()
        except (_ScriptedCrash, InjectedCrash) as error:
            self._death = error
        self._end()

    def _start(self) -> None:
        self._thread.start()

    def _pass_time(self) -> None:
        """What a step takes."""
        if self.knobs.step_s:
            time.sleep(self.knobs.step_s)

    def _wait_for_work(self) -> bool:
        with self._lock:
            if not self._rows and not self._waiting and not self._is_stopping:
                self._lock.wait(0.1)
            expired = self._drop_expired()
            started = self._admit()
        if expired:
            self._sink([RequestFailed(row.request.request_id, DeadlineExceeded()) for row in expired])
        if started:
            self._sink([RequestPhase(row.request.request_id, Phase.SCHEDULED) for row in started])
        return bool(self._rows)

    def _drop_expired(self) -> list[_Row]:
        """What has no time left does not start."""
        now_s = time.monotonic()
        expired = [row for row in self._waiting if (row.request.deadline_s or now_s + 1) <= now_s]
        self._waiting = [row for row in self._waiting if row not in expired] if expired else self._waiting
        return expired

    def _next(self) -> _Row:
        """The most critical that waits, the first of its class; a trial before all."""
        row = self._waiting[0]
        if not row.request.is_trial:
            row = max(self._waiting, key=lambda one: one.request.criticality)
        self._waiting.remove(row)
        return row

    def _admit(self) -> list[_Row]:
        started: list[_Row] = []
        while self._trial is None and self._waiting and len(self._rows) < self.knobs.max_rows:
            row = self._next()
            row.started_s = time.monotonic()
            self._rows[row.request.request_id] = row
            if row.request.is_trial:
                self._trial = row
            started.append(row)
        return started

    def _rows_of_step(self) -> list[_Row]:
        """All, or the one on trial; that it begins is known outside before its first step."""
        trial = self._trial
        if trial is not None and not trial.has_trial_begun:
            trial.has_trial_begun = True
            self._announce(trial, Phase.TRIAL_BEGAN)
        with self._lock:
            return [row for row in self._rows.values() if trial is None or row is trial]

    def _end_trial(self) -> None:
        trial = self._trial
        if trial is None:
            return
        num_steps = -(-trial.request.trial_tokens // self.knobs.tokens_per_step)
        if trial.num_steps < num_steps and trial.request.request_id in self._rows:
            return
        self._trial = None
        self._announce(trial, Phase.TRIAL_PASSED)

    def _announce(self, trial: _Row, phase: Phase) -> None:
        seen = threading.Event()
        self._sink([RequestPhase(trial.request.request_id, phase, seen)])
        self._await(seen)

    def _await(self, seen: threading.Event) -> None:
        """What a trial's judge must know is on its way, or that takes too long."""
        seen.wait(1.0)

    def _step(self) -> None:
        started_s = self._busy_since_s = time.monotonic()
        rows = self._rows_of_step()
        self.faults.before_step([(row.request.prompt_token_ids, row.position) for row in rows])
        while self._is_hanging and not self._is_stopping:
            time.sleep(0.01)
        self._pass_time()
        if self.knobs.crash_after_steps is not None and self._steps >= self.knobs.crash_after_steps:
            raise _ScriptedCrash
        self._steps += 1
        with self._lock:
            live = [row for row in rows if row.request.request_id in self._rows]
            events = list(itertools.chain.from_iterable(self._advance(row) for row in live))
        self.faults.before_read()
        self.faults.after_step(time.monotonic() - started_s)
        self._busy_since_s = None
        self._step_s += 0.2 * (time.monotonic() - started_s - self._step_s)
        if events:
            self._sink(events)
        self._end_trial()

    def _advance(self, row: _Row) -> list[EngineEvent]:
        request, knobs = row.request, self.knobs
        if request.deadline_s is not None and time.monotonic() >= request.deadline_s:
            return self._fail(row, DeadlineExceeded())
        if row.position >= 2 and request.prompt_token_ids == knobs.fail_on_prompt:
            return self._fail(row, NumericalError())
        if self.faults.meets("nan", request.prompt_token_ids, row.position):
            return self._fail(row, NumericalError())
        row.num_steps += 1
        if row.first_token_s is None:
            row.first_token_s = time.monotonic()
        events: list[EngineEvent] = [
            self._delta(row, index, choice) for index, choice in enumerate(row.choices) if not choice.has_ended
        ]
        if all(choice.has_ended for choice in row.choices):
            del self._rows[request.request_id]
            self._answer_tokens += 0.1 * (row.position - self._answer_tokens) if self._answer_tokens else row.position
        return events

    def _delta(self, row: _Row, index: int, choice: _Choice) -> ChoiceDelta:
        params = row.request.sampling
        start = choice.position
        last = script_tokens(choice.state, range(max(start - 1, 0), start))
        stop_id = next((token_id for token_id in last if token_id in params.stop_token_ids), None)
        if stop_id is not None:
            choice.length = start
        ids = script_tokens(choice.state, range(start, min(start + self.knobs.tokens_per_step, choice.length)))
        if stop_id is None:
            stop_id = next((token_id for token_id in ids if token_id in params.stop_token_ids), None)
            if stop_id is not None:
                ids = ids[: ids.index(stop_id) + 1]
                choice.length = start + len(ids)
        choice.position = start + len(ids)
        choice.has_ended = has_ended = choice.position >= choice.length
        logprobs = () if params.logprobs is None else tuple(_logprob(token_id, params.logprobs) for token_id in ids)
        self._num_tokens += len(ids)
        return ChoiceDelta(
            request_id=row.request.request_id,
            index=index,
            token_ids=ids,
            text=script_text(ids),
            logprobs=logprobs,
            finish_reason=None if not has_ended else FinishReason.LENGTH if stop_id is None else FinishReason.STOP,
            stop_token_id=stop_id,
            prompt_tokens=len(row.request.prompt_token_ids),
            tier=TIERS[0],
            bucket=1,
            timings=_timings(row) if has_ended else None,
        )

    def _fail(self, row: _Row, error: WorkerError) -> list[EngineEvent]:
        del self._rows[row.request.request_id]
        return [RequestFailed(row.request.request_id, error)]

    def _end(self) -> None:
        with self._lock:
            rows = [*self._rows.values(), *self._waiting]
            self._rows.clear()
            self._waiting.clear()
        if rows:
            self._sink([RequestFailed(row.request.request_id, EngineDead("the script is over")) for row in rows])


class _ScriptedCrash(Exception):
    pass


def _choices(request: GenerateRequest, info: EngineInfo) -> list[_Choice]:
    params = request.sampling
    length = params.max_tokens or info.max_model_len - len(request.prompt_token_ids)
    seed = 0 if params.is_greedy else params.seed
    choices = [_Choice(script_state(request.prompt_token_ids, seed, index), length) for index in range(params.n)]
    for index, choice in enumerate(choices):
        delivered = request.delivered_of(index)
        if delivered != script_tokens(choice.state, range(len(delivered))):
            raise InvalidRequest("delivered", f"is not how choice {index} begins")
        choice.position, choice.has_ended = len(delivered), index in request.finished
    return choices


def _logprob(token_id: int, num_top: int) -> Logprob:
    return Logprob(token_id, -0.5, tuple((token_id + place, -0.5 - place) for place in range(num_top)))


def _timings(row: _Row) -> Timings:
    now_s = time.monotonic()
    started_s, first_s = row.started_s or now_s, row.first_token_s or now_s
    return Timings(queue_s=started_s - row.submitted_s, prefill_s=first_s - started_s, decode_s=now_s - first_s)
