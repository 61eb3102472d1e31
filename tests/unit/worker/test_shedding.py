"""Criticality in an engine whose queue is full."""

from __future__ import annotations

import pytest

from tests.fakes.script_runner import script_engine
from worker.engine import Engine
from worker.errors import QueueFull
from worker.request import ChoiceDelta, Criticality, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams

SHEDDABLE, CRITICAL = Criticality.SHEDDABLE, Criticality.CRITICAL


def engine(max_waiting: int, max_batch: int = 1) -> Engine:
    made, _ = script_engine(lambda _: ord("x"), max_waiting=max_waiting, max_batch=max_batch)
    return made


def request(name: str, criticality: Criticality, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=2, n=n),
        criticality=criticality,
    )


def started(subject: Engine) -> list[str]:
    """Requests in the order of their first tokens, until nothing is left."""
    order: dict[str, None] = {}
    while subject.has_work:
        for event in subject.step():
            assert isinstance(event, ChoiceDelta)
            order[event.request_id] = None
    return list(order)


def test_a_critical_request_takes_the_place_of_a_sheddable_one_when_the_queue_is_full() -> None:
    subject = engine(max_waiting=2)
    subject.add(request("a", SHEDDABLE))
    subject.add(request("b", SHEDDABLE))
    (event,) = subject.add(request("c", CRITICAL))
    assert isinstance(event, RequestFailed)
    assert event.request_id == "b"
    assert isinstance(event.error, QueueFull)
    assert started(subject) == ["c", "a"]


def test_a_request_is_never_given_up_for_one_of_its_own_class() -> None:
    subject = engine(max_waiting=1)
    subject.add(request("a", CRITICAL))
    for criticality in (SHEDDABLE, CRITICAL):
        with pytest.raises(QueueFull):
            subject.add(request("late", criticality))
    assert started(subject) == ["a"]


def test_nothing_is_given_up_if_it_would_not_make_room() -> None:
    subject = engine(max_waiting=3, max_batch=4)
    subject.add(request("a", SHEDDABLE))
    subject.add(request("b", CRITICAL, n=2))
    with pytest.raises(QueueFull):
        subject.add(request("wide", CRITICAL, n=2))
    assert set(started(subject)) == {"a", "b"}
