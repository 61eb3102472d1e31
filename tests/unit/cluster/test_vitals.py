from __future__ import annotations

import pytest

from cluster.router.breaker import FAILURES_IN_A_ROW
from cluster.router.vitals import StepWatch, Vitals
from protos import control_pb2, generation_pb2, replica_pb2
from worker.progress import FIRST_STEP_S, MIN_STALL_S


def load(steps: int = 1, *, running: int = 1, age_s: float = 0.0, predicted_s: float = 0.1) -> control_pb2.Load:
    return control_pb2.Load(steps=steps, running=running, step_age_s=age_s, predicted_step_s=predicted_s)


def vitals() -> Vitals:
    subject = Vitals(pause_min_s=1, pause_max_s=30, may_open=lambda: True, clock=lambda: 0.0)
    subject.breaker.passed()
    return subject


@pytest.mark.parametrize(("predicted_s", "limit_s"), [(0.1, MIN_STALL_S), (1.0, 4.0), (0.0, FIRST_STEP_S)])
def test_a_step_that_outlasts_its_time_is_a_stall(predicted_s: float, limit_s: float) -> None:
    watch = StepWatch()
    assert not watch.is_stalled(load(age_s=limit_s - 0.25, predicted_s=predicted_s), 0.0)
    assert not watch.is_stalled(load(age_s=limit_s, predicted_s=predicted_s), 0.25)
    assert watch.is_stalled(load(age_s=limit_s + 0.25, predicted_s=predicted_s), 0.5)


def test_a_process_that_did_not_run_for_a_while_gets_the_time_of_a_report_to_go_on() -> None:
    watch = StepWatch()
    assert not watch.is_stalled(load(7, age_s=0.1), 0.0)
    assert not watch.is_stalled(load(7, age_s=5.0), 5.0)
    assert not watch.is_stalled(load(8, age_s=0.1), 5.25)
    assert not watch.is_stalled(load(8, age_s=5.0), 10.0)
    assert watch.is_stalled(load(8, age_s=5.25), 10.25)


def test_a_counter_that_stands_still_while_there_is_work_is_a_stall() -> None:
    watch = StepWatch()
    assert not watch.is_stalled(load(7), 10.0)
    assert not watch.is_stalled(load(7), 9.9 + MIN_STALL_S)
    assert watch.is_stalled(load(7), 10.1 + MIN_STALL_S)
    assert not watch.is_stalled(load(8), 10.2 + MIN_STALL_S)


def test_without_work_nothing_has_to_move() -> None:
    watch = StepWatch()
    for second in range(100):
        assert not watch.is_stalled(load(7, running=0), float(second))
    assert not watch.is_stalled(load(7), 100.0)


def test_loading_and_capturing_are_excused() -> None:
    watch, busy = StepWatch(), load(7, age_s=25.0)
    busy.is_preparing = True
    for second in range(60):
        assert not watch.is_stalled(busy, float(second))
    assert not watch.is_stalled(load(7), 60.0)


def test_a_new_connection_starts_from_nothing() -> None:
    watch = StepWatch()
    watch.is_stalled(load(7), 0.0)
    watch.forget()
    assert not watch.is_stalled(load(7), 100.0)


@pytest.mark.parametrize("code", [3, 8, 1, 4, 14, 5, 9, 16])
def test_mistakes_and_cancellations_of_clients_and_refusals_never_count(code: int) -> None:
    subject = vitals()
    for _ in range(1000):
        subject.note_end(replica_pb2.StreamEvent(error=replica_pb2.StreamError(code=code), end=True))
    assert subject.breaker.is_closed


def test_internal_errors_count() -> None:
    subject = vitals()
    for _ in range(FAILURES_IN_A_ROW):
        subject.note_end(replica_pb2.StreamEvent(error=replica_pb2.StreamError(code=13), end=True))
    assert not subject.breaker.is_closed


def test_good_answers_keep_it_closed() -> None:
    subject = vitals()
    for _ in range(50):
        for _ in range(2):
            subject.note_end(replica_pb2.StreamEvent(response=generation_pb2.GenerateResponse(), end=True))
        subject.note_end(replica_pb2.StreamEvent(error=replica_pb2.StreamError(code=13), end=True))
    assert subject.breaker.is_closed
