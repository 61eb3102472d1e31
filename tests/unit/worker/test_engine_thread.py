from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fakes.script_runner import ScriptRunner, script_engine
from worker.engine_thread import EngineThread
from worker.errors import Draining, EngineDead, InvalidRequest, QueueFull, RequestAborted
from worker.progress import FIRST_STEP_S, MIN_STALL_S, ProgressWatch
from worker.request import ChoiceDelta, EngineEvent, GenerateRequest, RequestFailed, RequestPhase
from worker.sampling import SamplingParams

Condition = Callable[[list[ChoiceDelta | RequestFailed]], bool]


class Sink:
    """Collects events and lets a test wait for them."""

    def __init__(self) -> None:
        self.events: list[ChoiceDelta | RequestFailed] = []
        self.phases: list[RequestPhase] = []
        self.calls: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        """How far requests are does not count as an event."""
        with self._changed:
            for event in events:
                if isinstance(event, RequestPhase):
                    self.phases.append(event)
                else:
                    self.events.append(event)
            self.calls.append(sum(not isinstance(event, RequestPhase) for event in events))
            self._changed.notify_all()

    def wait_for(self, condition: Condition, timeout_s: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), timeout_s)


def ended(name: str) -> Condition:
    return lambda events: any(
        e.request_id == name and (isinstance(e, RequestFailed) or e.finish_reason is not None) for e in events
    )


@contextmanager
def running(
    step_s: float = 0.0, **options: Any
) -> Iterator[tuple[EngineThread, Sink, ScriptRunner, list[BaseException]]]:
    def next_token(_: object) -> int:
        time.sleep(step_s)
        return ord("x")

    engine, runner = script_engine(next_token, clock=time.monotonic, **options)
    sink = Sink()
    deaths: list[BaseException] = []
    thread = EngineThread(engine, sink, on_death=deaths.append)
    try:
        yield thread, sink, runner, deaths
    finally:
        thread.stop()


def request(name: str, max_tokens: int = 5, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=max_tokens, n=n)
    )


def fill(engine: EngineThread) -> None:
    for i in range(10):
        engine.submit(request(f"more{i}", n=2))


def test_answers_of_many_threads_arrive_whole_and_in_order() -> None:
    with running() as (engine, sink, _, _):
        submitters = [threading.Thread(target=lambda i=i: engine.submit(request(f"r{i}"))) for i in range(20)]
        for submitter in submitters:
            submitter.start()
        for i in range(20):
            sink.wait_for(ended(f"r{i}"))
        for i in range(20):
            mine = [e for e in sink.events if e.request_id == f"r{i}"]
            assert all(isinstance(e, ChoiceDelta) for e in mine)
            assert len(mine) == 5


def test_all_rows_of_a_step_are_handed_over_in_one_call() -> None:
    with running(step_s=0.002) as (engine, sink, _, _):
        for i in range(8):
            engine.submit(request(f"r{i}", max_tokens=20))
        for i in range(8):
            sink.wait_for(ended(f"r{i}"))
        assert max(sink.calls) == 8


def test_bad_requests_are_refused_on_the_calling_thread() -> None:
    with running() as (engine, sink, _, _):
        with pytest.raises(InvalidRequest):
            engine.submit(GenerateRequest(request_id="r", prompt_token_ids=()))
        assert sink.events == []


def test_a_full_queue_is_refused_on_the_calling_thread() -> None:
    with running(step_s=0.05, max_waiting=4, max_batch=1) as (engine, _, _, _):
        for i in range(2):
            engine.submit(request(f"r{i}", n=2))
        with pytest.raises(QueueFull, match="limit is 4"):
            fill(engine)


def test_cancel_ends_a_running_request() -> None:
    with running(step_s=0.005) as (engine, sink, _, _):
        engine.submit(request("r", max_tokens=60))
        sink.wait_for(lambda events: len(events) >= 2)
        engine.cancel("r")
        sink.wait_for(ended("r"))
        assert isinstance(sink.events[-1], RequestFailed)
        assert isinstance(sink.events[-1].error, RequestAborted)
        assert len(sink.events) < 60


def test_a_draining_engine_refuses_new_work_and_finishes_the_old() -> None:
    with running(step_s=0.005) as (engine, sink, _, _):
        engine.submit(request("old", max_tokens=20))
        engine.drain()
        with pytest.raises(Draining):
            engine.submit(request("new"))
        sink.wait_for(ended("old"))
        assert isinstance(sink.events[-1], ChoiceDelta)


def test_an_error_in_a_step_ends_every_request_and_reports_the_death_once() -> None:
    with running(step_s=0.005, max_batch=2) as (engine, sink, runner, deaths):
        for i in range(4):
            engine.submit(request(f"r{i}", max_tokens=50))
        sink.wait_for(lambda events: len(events) >= 4)
        runner.error = RuntimeError("illegal memory access")
        for i in range(4):
            sink.wait_for(ended(f"r{i}"))
        assert all(isinstance(e.error, EngineDead) for e in sink.events if isinstance(e, RequestFailed))
        assert [str(death) for death in deaths] == ["illegal memory access"]
        with pytest.raises(EngineDead):
            engine.check()
        with pytest.raises(EngineDead):
            engine.submit(request("late"))


def test_stopping_ends_running_requests_and_is_not_a_death() -> None:
    with running(step_s=0.005) as (engine, sink, _, deaths):
        engine.submit(request("r", max_tokens=60))
        sink.wait_for(lambda events: len(events) >= 1)
        engine.stop()
        assert ended("r")(sink.events)
        assert deaths == []


def test_an_idle_engine_is_healthy_and_its_load_is_fresh() -> None:
    with running() as (engine, sink, _, _):
        engine.submit(request("r"))
        sink.wait_for(ended("r"))
        time.sleep(0.1)
        engine.check()
        assert (engine.load().running, engine.load().steps) == (0, 5)


def test_a_step_past_its_time_is_a_stall_and_a_new_step_clears_it() -> None:
    watch = ProgressWatch()
    watch.begin(10.0, predicted_s=1.0)
    watch.check(14.0)
    with pytest.raises(Exception, match=r"4\.1 s, 4\.0 s are allowed"):
        watch.check(14.1)
    watch.end()
    watch.check(1000.0)
    watch.begin(1000.0, predicted_s=0.001)
    watch.check(1000.0 + MIN_STALL_S)
    with pytest.raises(Exception, match="allowed"):
        watch.check(1000.1 + MIN_STALL_S)


def test_a_first_step_may_take_longer() -> None:
    watch = ProgressWatch()
    watch.begin(0.0, predicted_s=None)
    watch.check(FIRST_STEP_S)


def test_the_load_of_an_engine_whose_step_does_not_end_shows_its_age_growing() -> None:
    with running(step_s=0.4) as (engine, sink, _, _):
        engine.submit(request("r", max_tokens=2))
        ages = []
        for _ in range(8):
            time.sleep(0.1)
            ages.append(engine.load().step_age_s)
        sink.wait_for(ended("r"))
    assert max(ages) > 0.2


def test_a_worker_that_has_just_started_answers_before_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[float] = []

    def prepare_next(_: ScriptRunner) -> bool:
        prepared.append(time.monotonic())
        return len(prepared) < 3

    monkeypatch.setattr(ScriptRunner, "prepare_next", prepare_next)
    with running() as (thread, sink, _, _):
        time.sleep(0.3)
        assert not prepared
        thread.submit(request("first"))
        sink.wait_for(ended("first"))
        deadline_s = time.monotonic() + 20.0
        while len(prepared) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(prepared) == 3


def test_preparation_begins_without_a_request_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def prepare_next(_: ScriptRunner) -> bool:
        begun.set()
        return False

    monkeypatch.setattr("worker.engine_thread.FIRST_REQUEST_S", 0.2)
    monkeypatch.setattr(ScriptRunner, "prepare_next", prepare_next)
    with running():
        assert begun.wait(5.0)
