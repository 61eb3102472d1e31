from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscale.config import ScalingConfig
from cluster.autoscale.decide import Memory, decide, replicas_needed, usable_rows
from cluster.autoscale.demand import Demand
from protos import control_pb2

CONFIG = ScalingConfig(min_replicas=1, max_replicas=10, target_occupancy=0.5, down_after_s=60.0)


class Scaler:
    """Decisions after one another, each followed at once."""

    def __init__(self, config: ScalingConfig = CONFIG, current: int = 1) -> None:
        self.config = config
        self.current = current
        self.memory: Memory | None = None
        self.now_s = 1000.0
        self.num_changes = 0

    def see(self, demand: Demand, times: int = 1, every_s: float = 1.0) -> int:
        for _ in range(times):
            before = self.current
            self.current, self.memory = decide(demand, self.current, self.memory, self.now_s, self.config)
            self.num_changes += self.current != before
            self.now_s += every_s
        return self.current


def load(running: int, *, ready: int = 1, **values: float) -> Demand:
    return Demand(num_ready=ready, max_rows=8, running=running, **values)  # type: ignore[arg-type]


def test_a_step_of_load_is_followed_in_one_decision() -> None:
    scaler = Scaler()
    scaler.see(load(3), 20)
    assert scaler.current == 1
    assert scaler.see(load(20)) == 5


def test_a_peak_within_the_window_is_remembered_and_then_let_go() -> None:
    scaler = Scaler()
    scaler.see(load(20))
    assert scaler.see(load(3, ready=5), 59) == 5
    assert scaler.see(load(3, ready=5), 2) == 1
    assert scaler.num_changes == 2


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 60), st.floats(0, 0.3))
def test_steady_load_with_noise_changes_the_pool_at_most_upwards_and_never_back_and_forth(
    seed: int, mean: int, noise: float
) -> None:
    dice, scaler = random.Random(seed), Scaler(ScalingConfig(max_replicas=50, down_after_s=60.0))
    seen = []
    for _ in range(600):
        running = max(1, round(mean * dice.uniform(1 - noise, 1 + noise)))
        seen.append(scaler.see(load(running, ready=scaler.current)))
    needed = [
        replicas_needed(load(round(mean * (1 + sign * noise)) or 1), 1, Memory(), 0.0, scaler.config)
        for sign in (-1, 1)
    ]
    assert seen[0] >= needed[0]
    assert max(seen) <= max(needed[1], 1) + 1
    changes = [b - a for a, b in itertools.pairwise(seen) if a != b]
    assert all(abs(change) <= max(needed) - min(needed) + 1 for change in changes)
    if noise == 0:
        assert len(changes) <= 1


def test_the_same_load_for_ten_minutes_changes_the_pool_at_most_once() -> None:
    for running in (1, 5, 9, 17, 33):
        scaler = Scaler()
        scaler.see(load(running), 600)
        assert scaler.num_changes <= 1


def test_a_wait_that_is_too_long_adds_replicas_once_and_then_waits_for_them() -> None:
    scaler = Scaler(current=2)
    slow = load(4, ready=2, waiting=1, predicted_ttft_s=3.0)
    assert scaler.see(slow) == 4
    assert scaler.see(slow, 30) == 4
    assert scaler.see(slow, 40) > 4  # they have not come in the time that one takes to start


def test_rows_beyond_the_objective_for_tokens_do_not_count() -> None:
    config = ScalingConfig(target_token_s=0.01)
    assert usable_rows(load(8, step_s=0.01), config) == 8
    assert usable_rows(load(8, step_s=0.02), config) == 4
    assert usable_rows(load(8, step_s=1.0), config) == 1
    assert usable_rows(load(8, step_s=1.0), ScalingConfig()) == 8


def test_an_idle_pool_goes_to_zero_one_after_the_other_and_a_held_request_brings_it_back() -> None:
    scaler = Scaler(ScalingConfig(min_replicas=0, to_zero_after_s=100.0, down_after_s=20.0), current=1)
    scaler.see(load(30))
    assert scaler.current > 1
    seen = [scaler.see(Demand(num_ready=scaler.current, max_rows=8)) for _ in range(130)]
    assert seen[-1] == 0
    assert seen[50] == 1
    assert scaler.see(Demand(held=1)) == 1
    assert scaler.see(Demand(num_ready=1, max_rows=8, running=1), 30) == 1


def test_without_scale_to_zero_an_idle_pool_keeps_its_least() -> None:
    assert Scaler(current=3).see(Demand(num_ready=3, max_rows=8), 900) == 1


def test_bounds_hold_whatever_is_asked() -> None:
    assert Scaler().see(load(10_000)) == CONFIG.max_replicas
    assert Scaler(ScalingConfig(min_replicas=2, max_replicas=3), current=2).see(Demand(), 900) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"min_replicas": 3, "max_replicas": 2},
        {"min_replicas": -1},
        {"min_replicas": 0, "max_replicas": 0},
        {"target_occupancy": 0.0},
        {"target_ttft_s": 0.0},
        {"target_token_s": -1.0},
        {"down_after_s": 0.0},
    ],
)
def test_objectives_that_cannot_be_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(values)):
        ScalingConfig(**values)  # type: ignore[arg-type]


def report(
    *replicas: tuple[str, str, int, int], held: tuple[tuple[str, int, float], ...] = ()
) -> control_pb2.GetLoadsResponse:
    return control_pb2.GetLoadsResponse(
        replicas=[
            control_pb2.ReplicaLoad(
                incarnation=incarnation,
                model=model,
                state=control_pb2.REPLICA_STATE_READY,
                load=control_pb2.Load(running=running, waiting=waiting, max_rows=16, step_ms=5.0, queue_age_s=0.5),
            )
            for incarnation, model, running, waiting in replicas
        ],
        held=[control_pb2.HeldRequests(model=model, requests=count, oldest_s=age) for model, count, age in held],
    )


def test_a_replica_that_two_routers_know_counts_once_and_held_requests_add_up() -> None:
    one = report(("i1", "a", 3, 1), ("i2", "a", 2, 0), held=(("a", 2, 4.0),))
    other = report(("i1", "a", 3, 1), held=(("", 1, 0.2),))
    demand = Demand.of([one, other])
    assert (demand.num_ready, demand.running, demand.waiting, demand.held) == (2, 5, 1, 3)
    assert (demand.max_rows, demand.queue_age_s, demand.step_s) == (16, 4.0, 0.005)


def test_only_the_pool_s_own_model_counts() -> None:
    demand = Demand.of([report(("i1", "a", 3, 0), ("i2", "b", 7, 0), held=(("b", 5, 1.0), ("a", 1, 1.0)))], "a")
    assert (demand.num_ready, demand.running, demand.held) == (1, 3, 1)
