from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from worker.request import Criticality, GenerateRequest
from worker.sampling import SamplingParams
from worker.sequence import Sequence
from worker.waiting_queue import FAIR_TURN, WaitingQueue

SHEDDABLE, PLUS, CRITICAL, TOP = sorted(Criticality)
clock = itertools.count()


def request(criticality: Criticality, name: str = "r", n: int = 1, *, delivered: bool = False) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling=SamplingParams(n=n),
        criticality=criticality,
        delivered=((5,),) if delivered else (),
    )


def waiting(criticality: Criticality, name: str = "r", n: int = 1, *, delivered: bool = False) -> list[Sequence]:
    made, arrival_s = request(criticality, name, n, delivered=delivered), float(next(clock))
    return [Sequence(request=made, index=index, max_tokens=4, arrival_s=arrival_s) for index in range(n)]


def queue(*sequences: list[Sequence]) -> WaitingQueue:
    subject = WaitingQueue()
    for some in sequences:
        subject.add(some)
    return subject


def names(requests: list[GenerateRequest]) -> list[str]:
    return [one.request_id for one in requests]


def test_the_most_critical_starts_first_and_within_a_class_the_first_that_came() -> None:
    subject = queue(
        waiting(SHEDDABLE, "a"), waiting(CRITICAL, "b"), waiting(TOP, "c"), waiting(CRITICAL, "d"), waiting(PLUS, "e")
    )
    assert [subject.pop().request.request_id for _ in range(5)] == ["c", "b", "d", "e", "a"]
    assert not subject


def test_what_was_running_before_goes_before_all_others() -> None:
    subject = queue(waiting(TOP, "new"))
    subject.add_first(waiting(SHEDDABLE, "back", n=2))
    assert [(one.request.request_id, one.index) for one in subject] == [("back", 0), ("back", 1), ("new", 0)]
    assert subject.head.request.request_id == "back"


def test_no_class_waits_for_ever() -> None:
    subject = queue(waiting(SHEDDABLE, "patient"))
    for number in range(100):
        subject.add(waiting(TOP, f"t{number}"))
        started = subject.pop().request.request_id
        if started == "patient":
            break
    assert number < FAIR_TURN


@given(st.lists(st.tuples(st.sampled_from(sorted(Criticality)), st.booleans()), max_size=80))
def test_the_head_is_what_starts_and_everything_starts_once(steps: list[tuple[Criticality, bool]]) -> None:
    subject, queued, started = WaitingQueue(), 0, []
    for criticality, is_start in steps:
        subject.add(waiting(criticality, f"r{queued}"))
        queued += 1
        if is_start:
            head = subject.head
            assert subject.pop() is head
            started.append(head)
    assert len(subject) == queued - len(started)
    while subject:
        started.append(subject.pop())
    assert len({one.request.request_id for one in started}) == queued


def test_one_can_leave_from_anywhere() -> None:
    one, back, other = waiting(CRITICAL, "one"), waiting(CRITICAL, "back"), waiting(CRITICAL, "other")
    subject = queue(one, other)
    subject.add_first(back)
    for sequence in (*one, *back):
        subject.remove(sequence)
    assert list(subject) == other


def test_the_least_critical_and_the_youngest_of_them_are_given_up_first() -> None:
    subject = queue(
        waiting(PLUS, "plus"), waiting(SHEDDABLE, "old"), waiting(SHEDDABLE, "young"), waiting(CRITICAL, "critical")
    )
    assert names(subject.less_critical(CRITICAL, 1)) == ["young"]
    assert names(subject.less_critical(CRITICAL, 3)) == ["young", "old", "plus"]
    assert subject.less_critical(CRITICAL, 4) == []
    assert subject.less_critical(SHEDDABLE, 1) == []
    assert subject.num_below(TOP) == 4


def test_a_request_that_has_begun_is_never_given_up() -> None:
    half, resumed, whole = waiting(SHEDDABLE, "half", n=3), waiting(SHEDDABLE, "resumed", delivered=True), "whole"
    subject = queue(half, resumed, waiting(SHEDDABLE, whole, n=2))
    subject.remove(half[0])
    assert names(subject.less_critical(TOP, 1)) == [whole]
    assert subject.less_critical(TOP, 3) == []
