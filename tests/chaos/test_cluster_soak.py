"""A pool under Serve that loses a replica again and again keeps nothing of it, nor of the clients that went away."""

from __future__ import annotations

import pytest

from tests.chaos.cluster_soak import SoakPlan, run_soak

from bench import soak  # isort: skip
from tests.chaos.cluster_clients import Habits
from tests.fakes.ray_cluster import missing

PROBLEM = missing()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no cluster of several nodes: {PROBLEM}"),
]
PLAN = SoakPlan(
    minutes=0.6,
    warm_up_s=8.0,
    kill_every_s=14.0,
    read_every_s=2.0,
    replicas=3,
    kept=1,
    rows=4,
    step_s=0.03,
    habits=Habits(leaving=0.1, slow=0.05, pause_s=0.08),
    seed=3,
)


async def test_a_pool_that_loses_replicas_loses_no_answer_and_keeps_nothing() -> None:
    found = await run_soak(PLAN)
    results = soak.results_of(found)
    print(found.tally.complete, found.tally.left, found.tally.moved, found.whole_s, results.correctness)
    assert len(found.whole_s) >= 1
    assert found.tally.is_flawless, found.tally.problems
    assert found.tally.complete > 30
    assert found.tally.left > 0
    assert found.left == []
    assert {after - before for before, after in found.idle_tasks.values()} <= set(range(-4, soak.IDLE_TASKS + 1))
    roles = {life.role: life for life in found.vitals.lives.values()}
    assert {*soak.OURS, soak.KILLED, "Serve's controller", "Ray's GCS", "raylet"} <= roles.keys()
    assert all(reading.tasks for reading in roles["router"].readings)
    assert all(reading.eager_steps for reading in roles["replica, never killed"].readings[1:])
