from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.slowness import DEAD_BAND, LIMIT, Pace, Slowness, compare, pace_of, slowness
from protos import control_pb2


def run(step_ms: Sequence[float], rows: Sequence[int], seconds: float, *, noise: float = 0.0) -> list[Slowness]:
    """Replicas that take so long a step, with that many rows, compared twice a second."""
    rng = random.Random(7)
    estimates = [Slowness() for _ in step_ms]
    for tick in range(int(2 * seconds) + 1):
        paces = [
            Pace(ms * rng.uniform(1 - noise, 1 + noise), count, tick) for ms, count in zip(step_ms, rows, strict=True)
        ]
        compare(list(zip(estimates, paces, strict=True)), tick / 2)
    return estimates


@pytest.mark.parametrize("num_replicas", [2, 3, 8, 64])
def test_a_replica_five_times_slower_is_derated_within_five_seconds(num_replicas: int) -> None:
    estimates = run([25.0] + [5.0] * (num_replicas - 1), [8] * num_replicas, 5.0, noise=0.15)
    assert 4 < estimates[0].factor < 6
    assert {estimate.factor for estimate in estimates[1:]} == {1.0}


def test_noise_derates_nobody() -> None:
    assert {estimate.factor for estimate in run([5.0] * 8, [8] * 8, 60.0, noise=0.3)} == {1.0}


def test_more_rows_excuse_a_longer_step_in_proportion_and_fewer_rows_do_not() -> None:
    assert slowness(Pace(40, 16, 1), [Pace(5, 2, 1)]) == 1.0
    assert slowness(Pace(40, 2, 1), [Pace(5, 16, 1)]) == 8.0


def test_alone_nobody_is_slow() -> None:
    assert slowness(Pace(40, 1, 1), []) is None
    estimate = Slowness()
    compare([(estimate, Pace(1000, 1, 1))], 1.0)
    assert estimate.estimate == 1.0


def test_a_replica_that_recovers_is_rated_up_again() -> None:
    estimates = [Slowness(), Slowness()]
    for tick in range(41):
        paces = [Pace(25.0 if tick < 20 else 5.0, 4, tick), Pace(5.0, 4, tick)]
        compare(list(zip(estimates, paces, strict=True)), tick / 2)
        if tick == 19:
            assert estimates[0].factor > 4
    assert estimates[0].factor == 1.0


def test_a_derated_replica_that_gets_nothing_is_tried_again_after_a_while() -> None:
    estimates, stale = run([25.0, 5.0], [4, 4], 5.0), Pace(25.0, 4, 999)
    for tick in range(200):
        compare([(estimates[0], stale), (estimates[1], Pace(5.0, 4, 1000 + tick))], 5.5 + tick / 2)
    assert estimates[0].factor == 1.0


@given(
    st.floats(0.01, 1e4),
    st.integers(1, 256),
    st.lists(st.tuples(st.floats(0.01, 1e4), st.integers(1, 256)), min_size=1),
)
def test_the_estimate_is_bounded(own_ms: float, rows: int, peers: list[tuple[float, int]]) -> None:
    estimate = slowness(Pace(own_ms, rows, 1), [Pace(ms, count, 1) for ms, count in peers])
    assert estimate is not None
    assert 1 <= estimate <= LIMIT


def test_a_pace_changes_with_new_steps_or_with_a_step_that_takes_long() -> None:
    first = pace_of(control_pb2.Load(step_ms=5, running=3, steps=10), None)
    assert first == Pace(5, 3, 10)
    assert pace_of(control_pb2.Load(step_ms=5, running=0, steps=10), first) is first
    late = control_pb2.Load(step_ms=5, running=3, steps=10, step_age_s=1.5, predicted_step_s=0.5)
    assert pace_of(late, first) == Pace(15, 3, 10)
    long_prefill = control_pb2.Load(step_ms=5, running=3, steps=10, step_age_s=0.4, predicted_step_s=0.5)
    assert pace_of(long_prefill, first) is first
    capturing = control_pb2.Load(
        step_ms=5, running=3, steps=10, step_age_s=1.5, predicted_step_s=0.5, is_preparing=True
    )
    assert pace_of(capturing, first) is first
    assert pace_of(control_pb2.Load(), None) is None
    assert DEAD_BAND > 1
