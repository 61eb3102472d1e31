from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.errors import Overloaded
from cluster.router.admission import MAX_RETRY_S, MIN_RETRY_S, Admission, Demand, Limits, Room, judge, rows_of, together
from protos import control_pb2
from worker.request import Criticality

SHEDDABLE, PLUS, CRITICAL, TOP = sorted(Criticality)
LIMITS = Limits(max_waiting=8, max_wait_s=60.0)
TOKENS = 100.0
# A row ends every 100 * 0.01 / 4 = 0.25 s.
FULL = Room(max_rows=4, num_inside=4, step_s=0.01)


def demand(time_left_s: float | None = None, criticality: Criticality = CRITICAL, n: int = 1) -> Demand:
    return Demand(n, time_left_s, 1.0, criticality)


def waiting(count: int) -> Room:
    return replace(FULL, num_inside=4 + count)


def reason(rooms: list[Room], want: Demand) -> str:
    refusal = judge(rooms, want, LIMITS, TOKENS)
    return "" if refusal is None else refusal.reason


def test_a_replica_with_a_free_row_takes_anything_however_short_its_time() -> None:
    assert reason([replace(FULL, num_inside=3)], demand(0.001)) == ""
    assert reason([waiting(100), replace(FULL, num_inside=3)], demand(0.001)) == ""


def test_several_choices_need_several_rows() -> None:
    assert reason([replace(FULL, num_inside=3)], demand(1.1, n=2)) == "too_late"
    assert reason([replace(FULL, num_inside=2)], demand(1.1, n=2)) == ""


def test_what_cannot_be_answered_before_its_deadline_is_refused_at_once() -> None:
    # Behind one other: two ends of 0.25 s and a step to the first token, and a second for the rest of the answer.
    assert reason([waiting(1)], demand(1.5)) == "too_late"
    assert reason([waiting(1)], demand(1.6)) == ""
    assert reason([waiting(1), FULL], demand(1.5)) == ""


def test_a_queue_that_stands_is_held_to_half_of_the_time_a_deadline_leaves() -> None:
    # Behind two others: 0.76 s to the first token. The deadline leaves a second, of which 0.9 may be used.
    burst, standing = replace(demand(2.0), full_s=0.5), replace(demand(2.0), full_s=0.6)
    assert [reason([waiting(2)], one) for one in (burst, standing)] == ["", "too_late"]
    assert reason([waiting(2)], replace(demand(None), full_s=100.0)) == ""
    assert reason([waiting(2)], replace(demand(3.0), full_s=100.0)) == ""


@given(st.floats(0.001, 100), st.floats(0, 100), st.integers(0, 7))
def test_more_time_never_hurts_in_a_queue_that_stands(time_left_s: float, full_s: float, count: int) -> None:
    want = replace(demand(time_left_s), full_s=full_s)
    if reason([waiting(count)], want) == "":
        assert reason([waiting(count)], replace(want, time_left_s=time_left_s + 1)) == ""


def test_when_every_queue_is_full_all_classes_are_refused() -> None:
    for criticality in Criticality:
        assert reason([waiting(8), waiting(9)], demand(None, criticality)) == "queue_full"


def test_the_lower_the_class_the_less_of_the_queue_it_may_use() -> None:
    taken = {
        one: next(count for count in range(20) if reason([waiting(count)], demand(None, one))) for one in Criticality
    }
    assert taken == {SHEDDABLE: 2, PLUS: 4, CRITICAL: 7, TOP: 8}


def test_the_lower_the_class_the_less_it_may_wait_of_the_time_it_has() -> None:
    assert [bool(reason([waiting(2)], demand(2.2, one))) for one in sorted(Criticality)] == [True, True, False, False]


def test_a_request_without_a_deadline_does_not_wait_for_ever_either() -> None:
    slow = replace(waiting(2), step_s=1.0)
    assert judge([slow], demand(), Limits(max_waiting=100, max_wait_s=60), TOKENS) is not None


def test_one_row_still_has_a_queue_of_one_for_every_class() -> None:
    single = Room(max_rows=1, num_inside=1, step_s=0.001)
    assert judge([single], demand(None, SHEDDABLE), Limits(max_waiting=1, max_wait_s=60), TOKENS) is None


def test_a_replica_that_says_nothing_of_its_rows_is_not_second_guessed() -> None:
    assert reason([Room(max_rows=0, num_inside=10_000)], demand(0.001)) == ""


rooms = st.lists(
    st.builds(Room, st.integers(1, 64), st.integers(0, 300), st.integers(0, 9999), st.floats(0, 0.01), st.floats(0, 1)),
    min_size=1,
    max_size=8,
)


@given(rooms, st.one_of(st.none(), st.floats(0.001, 100)), st.integers(1, 8), st.floats(0, 2000), st.floats(0, 10))
def test_whoever_takes_a_class_takes_every_higher_one(
    some: list[Room], time_left_s: float | None, n: int, tokens: float, answer_s: float
) -> None:
    refused = [
        judge(some, Demand(n, time_left_s, answer_s, one), LIMITS, tokens) is not None for one in sorted(Criticality)
    ]
    assert refused == sorted(refused, reverse=True)


@given(rooms, st.floats(0.001, 100), st.integers(1, 4), st.floats(0, 2000))
def test_more_time_and_an_idle_replica_never_hurt(some: list[Room], time_left_s: float, n: int, tokens: float) -> None:
    if judge(some, demand(time_left_s, n=n), LIMITS, tokens) is None:
        assert judge(some, demand(time_left_s + 1, n=n), LIMITS, tokens) is None
    assert judge([*some, Room(8, 0)], demand(time_left_s, n=n), LIMITS, tokens) is None


def check(subject: Admission, *some: Room, time_left_s: float | None = None) -> None:
    subject.check(some, num_sequences=1, max_tokens=None, time_left_s=time_left_s, criticality=CRITICAL)


def test_a_refusal_says_when_to_come_back_and_is_counted() -> None:
    subject = Admission(RouterConfig(max_waiting=8), jitter=lambda: 1.0)
    subject.note_answer(100)
    with pytest.raises(Overloaded, match="not come in time") as late:
        check(subject, waiting(3), time_left_s=1.2)
    # The first token would come after 1.01 s, and 0.9 times 0.2 s is what there is to wait.
    assert late.value.retry_after_s == pytest.approx(0.83)
    with pytest.raises(Overloaded, match="queues of all replicas are full"):
        check(subject, waiting(8))
    assert subject.refusals == {("too_late", CRITICAL): 1, ("queue_full", CRITICAL): 1}


def test_a_free_row_ends_a_queue_that_stood() -> None:
    now_s = 0.0
    subject = Admission(RouterConfig(), clock=lambda: now_s)
    subject.note_answer(100)
    check(subject, waiting(2), time_left_s=2.0)
    now_s = 0.9
    with pytest.raises(Overloaded, match="not come in time"):
        check(subject, waiting(2), time_left_s=2.0)
    subject.note_room()
    check(subject, waiting(2), time_left_s=2.0)
    now_s = 1.2
    check(subject, waiting(2), time_left_s=2.0)


@given(st.floats(0, 1e6), st.integers(8, 10**6))
def test_when_to_come_back_is_bounded(step_s: float, count: int) -> None:
    subject = Admission(RouterConfig(max_waiting=8))
    subject.note_answer(100)
    with pytest.raises(Overloaded) as full:
        check(subject, replace(waiting(count), step_s=step_s))
    assert 0.8 * MIN_RETRY_S <= full.value.retry_after_s <= 1.2 * MAX_RETRY_S


def test_clients_that_are_refused_together_do_not_come_back_together() -> None:
    subject, times = Admission(RouterConfig(max_waiting=8)), set()
    subject.note_answer(100)
    for _ in range(50):
        with pytest.raises(Overloaded) as full:
            check(subject, waiting(8))
        times.add(full.value.retry_after_s)
    assert len(times) > 40


def test_the_length_of_answers_is_learnt() -> None:
    subject = Admission(RouterConfig())
    for _ in range(100):
        subject.note_answer(200)
    assert subject.answer_tokens == pytest.approx(200)
    for _ in range(100):
        subject.note_answer(50)
    assert 50 <= subject.answer_tokens < 51


def test_without_replicas_there_is_nothing_to_judge() -> None:
    check(Admission(RouterConfig()), time_left_s=0.001)


def test_replicas_in_front_of_which_requests_wait_are_judged_as_one() -> None:
    both = together([FULL, replace(FULL, num_inside=1, prefill_tokens=10)], 3)
    assert (both.max_rows, both.num_waiting, both.num_free_rows, both.prefill_tokens) == (8, 3, 0, 5)
    assert both.predict_s(1, TOKENS) == pytest.approx(4 * 0.125 + 0.01)


def test_rows_nobody_gets_for_lack_of_blocks_are_not_counted() -> None:
    blocked = control_pb2.Load(max_rows=64, running=5, waiting=3, queue_age_s=2.0)
    assert rows_of(blocked) == 5
    fresh = control_pb2.Load(max_rows=64, running=5, waiting=3, queue_age_s=0.1)
    idle = control_pb2.Load(max_rows=64)
    assert rows_of(fresh) == rows_of(idle) == 64
