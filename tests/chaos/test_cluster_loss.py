"""A Ray cluster loses a node under load, and no request with it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos.cluster_pool import cluster_pool

from tests.chaos.cluster_events import ClusterLoad  # isort: skip
from tests.fakes.ray_cluster import missing

PROBLEM = missing()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no cluster of several nodes: {PROBLEM}"),
]


async def test_a_node_killed_under_load_loses_changes_and_repeats_nothing() -> None:
    async with cluster_pool() as pool:
        await pool.deploy(num_replicas=3)
        before = await pool.whole(3)
        load = ClusterLoad(pool.client, seed=5, max_tokens=120)
        load.resize(9)
        await asyncio.sleep(2)
        began_s = time.monotonic()
        async with load.during("node killed") as event:
            num_killed = await pool.kill_fullest_node()
            await pool.until(lambda ready: len(ready) == 3 and len(ready - before) >= num_killed, 120)
        await load.end()
    print(f"{event.line()}; {time.monotonic() - began_s:.1f} s in all")
    assert num_killed == 2, "Serve spreads three replicas over two nodes"
    assert event.moved > 0, "answers of the dead node went on elsewhere"
    assert event.is_flawless
    assert load.between.is_flawless
