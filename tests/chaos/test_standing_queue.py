"""A pool that has more to do than it can, and that stands still now and then: on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc

from tests.chaos.open_loop import Flood, flood_over
from tests.chaos.sim_pool import CLIENT, SimPool, sim_pool
from tests.chaos.virtual_time import run_virtual

MAX_ROWS, STEP_S, TOKENS, DEADLINE_S = 8, 0.02, 16, 2.0
CAPACITY = 2 * MAX_ROWS / (STEP_S * TOKENS)
HICCUP_S, EVERY_S = 0.3, 3.0
SECONDS = 10.0


async def offer(pool: SimPool, factor: float, seconds: float) -> Flood:
    channels: Any = [pool.network.channel(CLIENT, pool.router.address)]
    rng = random.Random(3)
    return await flood_over(channels, factor * CAPACITY, seconds, rng=rng, max_tokens=TOKENS, timeout_s=DEADLINE_S)


async def hiccup_on(pool: SimPool) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        for replica in pool.replicas:
            replica.engine.freeze()
        await asyncio.sleep(HICCUP_S)
        for replica in pool.replicas:
            replica.engine.thaw()


async def hiccups(factor: float) -> Flood:
    async with sim_pool(2, step_s=STEP_S, max_rows=MAX_ROWS) as pool:
        await offer(pool, 0.5, 2.0)
        hiccuping = asyncio.create_task(hiccup_on(pool))
        found = await offer(pool, factor, SECONDS)
        hiccuping.cancel()
    return found


def test_a_queue_that_stands_leaves_time_for_hiccups() -> None:
    found = run_virtual(lambda: hiccups(2.0))
    print(found.describe(), f"answers p99 {found.answer_s(0.99):.2f} s")
    late = len(found.of(grpc.StatusCode.DEADLINE_EXCEEDED))
    assert late <= 0.02 * len(found.of(grpc.StatusCode.OK))
    assert found.goodput >= 0.95 * CAPACITY * (1 - HICCUP_S / (EVERY_S + HICCUP_S))
