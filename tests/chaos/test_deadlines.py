"""Requests that want their answers sooner than they can be had."""

from __future__ import annotations

import asyncio
import random

from cluster.client import DeadlineExceeded, ResourceExhausted
from tests.chaos.chaos_pool import chaos_pool
from tests.chaos.oracle import Outcome, random_question


async def test_a_storm_of_short_deadlines_leaves_nothing_behind_and_delays_nobody_who_can_wait() -> None:
    draw = random.Random(4)
    async with chaos_pool(2, step_s=0.005, max_rows=8) as pool:
        patient = [asyncio.create_task(pool.ask(random_question(draw))) for _ in range(8)]
        hurried = [
            asyncio.create_task(pool.ask(random_question(draw), timeout_s=draw.uniform(0.005, 0.2))) for _ in range(400)
        ]
        records = await asyncio.gather(*hurried)
        assert [record for record in await asyncio.gather(*patient) if not record.is_right] == []
        await pool.wait_idle()
        assert (await pool.ask(random_question(draw))).is_right
    for record in records:
        assert record.violations == []
        assert record.outcome is Outcome.COMPLETE or isinstance(record.error, (DeadlineExceeded, ResourceExhausted))
    assert any(isinstance(record.error, DeadlineExceeded) for record in records)
