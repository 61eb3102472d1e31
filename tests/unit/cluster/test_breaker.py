from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.router.breaker import (
    FAILURES_IN_A_ROW,
    FORGIVEN_AFTER_S,
    LOSS_WINDOW_S,
    MIN_OUTCOMES,
    WINDOW_S,
    Breaker,
    BreakerState,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def breaker(clock: Clock, *, others: bool = True, closed: bool = True) -> Breaker:
    subject = Breaker(pause_min_s=1.0, pause_max_s=30.0, may_open=lambda: others, clock=clock, jitter=lambda: 1.0)
    if closed:
        subject.passed()
    return subject


def fail_again(subject: Breaker, clock: Clock) -> float:
    """The next pause of a breaker whose canary fails after it."""
    clock.now_s += subject.pause_left_s
    subject.probing()
    subject.refused()
    return subject.pause_left_s


def test_a_new_replica_needs_a_canary() -> None:
    subject = breaker(Clock(), closed=False)
    assert subject.state is BreakerState.HALF_OPEN
    subject.passed()
    assert subject.is_closed


def test_failures_in_a_row_open_it_however_slowly_they_come() -> None:
    clock = Clock()
    subject = breaker(clock)
    for _ in range(FAILURES_IN_A_ROW - 1):
        subject.failed()
        clock.now_s += 2 * WINDOW_S
    assert subject.is_closed
    subject.failed()
    assert subject.state is BreakerState.OPEN
    assert subject.num_trips == 1


def test_half_of_the_answers_of_the_window_open_it_and_fewer_do_not() -> None:
    clock = Clock()
    subject = breaker(clock)
    for _ in range(20):
        subject.succeeded()
        subject.succeeded()
        subject.failed()
    assert subject.is_closed
    clock.now_s += WINDOW_S + 1
    for _ in range(MIN_OUTCOMES):
        subject.succeeded()
        subject.failed()
    assert subject.state is BreakerState.OPEN


def test_the_share_of_failures_never_closes_the_last_door() -> None:
    subject = breaker(Clock(), others=False)
    for _ in range(1000):
        subject.failed()
    assert subject.is_closed
    subject.stalled()
    assert not subject.is_closed


def test_work_without_progress_opens_it_at_once() -> None:
    subject = breaker(Clock())
    subject.stalled()
    assert (subject.state, subject.pause_left_s) == (BreakerState.OPEN, 1.0)


def test_one_loss_costs_a_canary_and_a_second_one_soon_after_a_pause() -> None:
    clock = Clock()
    subject = breaker(clock)
    subject.lost()
    assert (subject.state, subject.pause_left_s) == (BreakerState.HALF_OPEN, 0.0)
    subject.passed()
    clock.now_s += LOSS_WINDOW_S + 1
    subject.lost()
    assert subject.pause_left_s == 0
    clock.now_s += 1
    subject.lost()
    assert subject.pause_left_s > 0


def test_a_connection_that_ended_as_asked_costs_only_a_canary() -> None:
    subject = breaker(Clock())
    for _ in range(5):
        subject.reconnecting()
        assert subject.state is BreakerState.HALF_OPEN
        subject.passed()
    assert subject.num_trips == 0


def test_pauses_double_up_to_the_longest_and_start_over_after_a_good_while() -> None:
    clock = Clock()
    subject = breaker(clock)
    subject.stalled()
    pauses = [subject.pause_left_s, *(fail_again(subject, clock) for _ in range(6))]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    subject.probing()
    subject.passed()
    subject.stalled()
    assert subject.pause_left_s == 30
    subject.passed()
    clock.now_s += FORGIVEN_AFTER_S
    subject.stalled()
    assert subject.pause_left_s == 1


def test_pauses_of_many_routers_do_not_end_together() -> None:
    clock = Clock()
    pauses = set()
    for _ in range(50):
        subject = Breaker(pause_min_s=1.0, pause_max_s=30.0, may_open=lambda: True, clock=clock)
        subject.stalled()
        pauses.add(round(subject.pause_left_s, 4))
    assert len(pauses) > 40
    assert 0.8 <= min(pauses) < max(pauses) <= 1.2


events = st.lists(
    st.sampled_from(["succeeded", "failed", "stalled", "lost", "reconnecting", "probing", "passed", "refused"]),
    max_size=60,
)


@given(events, st.booleans())
def test_whatever_happens_a_canary_that_comes_back_closes_it_and_pauses_stay_bounded(
    names: list[str], others: bool
) -> None:
    clock = Clock()
    subject = breaker(clock, others=others, closed=False)
    for name in names:
        getattr(subject, name)()
        clock.now_s += 0.1
        assert 0 <= subject.pause_left_s <= 30
        assert (subject.pause_left_s == 0) or subject.state is BreakerState.OPEN
    subject.passed()
    assert subject.is_closed


@given(st.lists(st.booleans(), min_size=20, max_size=200))
def test_mostly_good_answers_never_open_it(outcomes: list[bool]) -> None:
    subject = breaker(Clock())
    for is_good in outcomes:
        subject.succeeded()
        subject.succeeded()
        if not is_good:
            subject.failed()
    assert subject.is_closed
