from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.retry_budget import RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_when_everything_fails_retries_are_a_tenth_of_requests() -> None:
    budget, retries = RetryBudget(clock=Clock()), 0
    for _ in range(1000):
        budget.request()
        while budget.try_again():
            retries += 1
    assert 100 <= retries <= 101


def test_a_quiet_client_may_try_again_once_a_second() -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    assert budget.try_again()
    assert not budget.try_again()
    clock.now_s += 1
    assert budget.try_again()
    clock.now_s += 3600
    assert [budget.try_again() for _ in range(3)] == [True, False, False]


def test_what_is_saved_up_is_bounded() -> None:
    budget = RetryBudget(max_retries=5, clock=Clock())
    for _ in range(10_000):
        budget.request()
    assert [budget.try_again() for _ in range(7)] == [True] * 5 + [False] * 2


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.5)), max_size=400))
def test_retries_never_exceed_a_tenth_of_requests_and_one_a_second(events: list[tuple[bool, float]]) -> None:
    clock = Clock()
    budget, requests, retries = RetryBudget(clock=clock), 0, 0
    for is_request, pause_s in events:
        clock.now_s += pause_s
        if is_request:
            budget.request()
            requests += 1
        retries += budget.try_again()
    assert retries <= 1 + 0.1 * requests + clock.now_s + 1e-6
