"""A Ray cluster whose replicas run the embedded model loses parts, and every answer is the undisturbed one."""

from __future__ import annotations

import pytest

from tests.chaos.cluster_model import ModelPlan, run_model

from tests.fakes.ray_cluster import missing  # isort: skip

PROBLEM = missing()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no cluster of several nodes: {PROBLEM}"),
]


async def test_no_answer_of_the_model_is_lost_changed_or_repeated_while_its_cluster_loses_parts() -> None:
    events = await run_model(ModelPlan(streams=4, questions=6, min_tokens=10, max_tokens=20, seed=2))
    by_name = {event.name: event for event in events}
    assert list(by_name) == [
        "load rises: 1 to 2 replicas",
        "load falls: 2 to 1 replicas",
        "nothing",
        "node killed",
        "controller and a replica killed",
        "rolling restart of 2 replicas",
        "between events",
    ]
    for event in events:
        assert event.is_flawless, event.line()
    assert by_name["node killed"].moved + by_name["controller and a replica killed"].moved > 0
    assert by_name["load falls: 2 to 1 replicas"].moved == 0, "a replica that is taken away finishes what it has"
    assert sum(event.answers for event in events) > 10
