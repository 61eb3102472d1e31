"""Quotas of tenants, with a clock that the test turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import QuotaExceeded
from cluster.security.quota import Account, Quota, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_gives_its_burst_at_once_and_its_rate_from_then_on() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 50, clock=clock)
    assert bucket.take(50) == 0
    assert bucket.take(20) == pytest.approx(2.0)
    clock.now_s += 2.0
    assert bucket.take(20) == 0
    clock.now_s += 1000
    assert bucket.level == 50


def test_what_costs_more_than_a_full_bucket_is_let_through_by_a_full_one_and_paid_off_after() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 50, clock=clock)
    assert bucket.take(150) == 0
    assert bucket.take(1) == pytest.approx(10.1)


def test_an_account_pays_what_was_used_and_not_what_was_guessed() -> None:
    account = Account("a", Quota(tokens_per_s=10, burst_tokens=100), clock=Clock())
    account.open(80)
    assert account.level == 20
    account.close(80, used=30)
    assert account.level == 70
    account.open(10)
    account.close(10, used=200)
    assert account.level == -130
    with pytest.raises(QuotaExceeded) as caught:
        account.open(10)
    assert caught.value.retry_after_s == pytest.approx(14.0)


def test_slots_are_counted_and_come_back() -> None:
    account = Account("a", Quota(max_streams=2), clock=Clock())
    account.open(1)
    account.open(1)
    with pytest.raises(QuotaExceeded, match="2 requests at the same time"):
        account.open(1)
    account.close(1, 1)
    account.open(1)
    assert account.num_streams == 2


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    account = Account("a", Quota(tokens_per_s=10, burst_tokens=10, max_streams=1), clock=clock)
    account.open(10)
    for _ in range(5):
        with pytest.raises(QuotaExceeded):
            account.open(10)
    account.close(10, 10)
    clock.now_s += 1
    account.open(10)


def test_a_changed_quota_counts_at_once() -> None:
    clock = Clock()
    account = Account("a", Quota(tokens_per_s=10, burst_tokens=10), clock=clock)
    account.open(10)
    account.change(Quota())
    account.open(10**9)
    account.change(Quota(tokens_per_s=10, burst_tokens=20))
    account.open(20)
    with pytest.raises(QuotaExceeded):
        account.open(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_s": 0},
        {"tokens_per_s": -1},
        {"tokens_per_s": math.nan},
        {"burst_tokens": -1},
        {"burst_tokens": math.inf},
        {"max_streams": -1},
    ],
)
def test_impossible_limits_are_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Quota(**changes)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=60),
    st.integers(1, 100),
    st.integers(1, 500),
)
def test_no_more_than_burst_and_rate_is_ever_used_beyond_the_guesses(
    requests: list[tuple[float, int, int]], rate: int, burst: int
) -> None:
    clock = Clock()
    account = Account("a", Quota(tokens_per_s=rate, burst_tokens=burst), clock=clock)
    began_s, used, overrun = clock.now_s, 0.0, 0.0
    waits = [1.0]
    for pause_s, cost, really in requests:
        clock.now_s += pause_s
        try:
            account.open(cost)
        except QuotaExceeded as error:
            waits.append(error.retry_after_s)
            continue
        account.close(cost, really)
        used += really
        overrun = max(overrun, really, cost)
    assert used <= burst + rate * (clock.now_s - began_s) + overrun + 1e-6
    assert min(waits) > 0
