"""Replicas that leave in order, or late: what they have goes on elsewhere."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.client import InternalError
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Question, Record, random_question


@asynccontextmanager
async def load(pool: ChaosPool, seed: int, clients: int = 12) -> AsyncIterator[list[Record]]:
    """Clients that ask one question after the other while the block runs; all records are there after it."""
    is_over = False
    records: list[Record] = []

    async def ask_on(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while not is_over:
            records.append(await pool.ask(random_question(draw)))

    clients_ = [asyncio.create_task(ask_on(number)) for number in range(clients)]
    yield records
    is_over = True
    await asyncio.gather(*clients_)


async def test_a_rolling_restart_loses_nothing() -> None:
    async with chaos_pool(3, step_s=0.005) as pool:
        async with load(pool, 1) as records:
            for name in tuple(pool.replicas):
                leaving = pool.replicas[name]
                leaving.send(signal.SIGTERM)
                assert await asyncio.wait_for(leaving.process.wait(), 30) == 0
                await pool.spawn(name)
                await pool.wait_ready(3)
        assert len(records) > 50
        assert [record for record in records if not record.is_right] == []


async def test_what_outlasts_the_grace_of_a_drain_goes_on_elsewhere() -> None:
    async with chaos_pool(2, step_s=0.02) as pool:
        questions = [Question(prompt=(3, number + 3), max_tokens=150, seed=number) for number in range(10)]
        asked = [asyncio.create_task(pool.ask(question)) for question in questions]
        await asyncio.sleep(0.5)
        await pool.client.drain("r0", grace_s=0.2)
        records = await asyncio.gather(*asked)
    assert [record for record in records if not record.is_right] == []
    assert sum(record.attempts > 1 for record in records) == 5
    assert max(record.longest_gap_s for record in records) < 2.0


async def test_a_replica_that_is_killed_while_it_drains_loses_nothing() -> None:
    async with chaos_pool(2, step_s=0.02) as pool:
        questions = [Question(prompt=(4, number + 3), max_tokens=100, seed=number, n=2) for number in range(10)]
        asked = [asyncio.create_task(pool.ask(question)) for question in questions]
        await asyncio.sleep(0.5)
        pool.replicas["r0"].send(signal.SIGTERM)
        await asyncio.sleep(0.3)
        await pool.replicas["r0"].kill()
        records = await asyncio.gather(*asked)
    assert [record for record in records if not record.is_right] == []


async def test_a_replica_that_is_killed_while_it_resumes_what_another_lost_costs_whom_it_tried_alone_at_most() -> None:
    async with chaos_pool(3, step_s=0.02) as pool:
        questions = [Question(prompt=(5, number + 3), max_tokens=100, seed=number, n=2) for number in range(12)]
        asked = [asyncio.create_task(pool.ask(question)) for question in questions]
        await asyncio.sleep(0.5)
        await pool.replicas["r0"].kill()
        await asyncio.sleep(0.05)
        await pool.replicas["r1"].kill()
        records = await asyncio.gather(*asked)
    assert [record.violations for record in records if record.violations] == []
    # One that was alone on both replicas as they died cannot be told from one that ended them.
    failed = [record.error for record in records if not record.is_right]
    assert len(failed) <= 1
    assert all(isinstance(error, InternalError) for error in failed)


async def test_while_other_replicas_die_a_death_under_one_request_alone_proves_nothing() -> None:
    async with chaos_pool(5, step_s=0.02) as pool:
        questions = [Question(prompt=(7, number + 3), max_tokens=100, seed=number, n=2) for number in range(20)]
        asked = [asyncio.create_task(pool.ask(question)) for question in questions]
        await asyncio.sleep(0.3)
        await pool.replicas["r4"].kill()
        await asyncio.sleep(0.5)
        await pool.replicas["r0"].kill()
        await asyncio.sleep(0.05)
        await pool.replicas["r1"].kill()
        records = await asyncio.gather(*asked)
    assert [record for record in records if not record.is_right] == []


async def test_the_loss_of_every_replica_is_made_good_by_their_successors() -> None:
    async with chaos_pool(2, step_s=0.02) as pool:
        questions = [Question(prompt=(6, number + 3), max_tokens=100, seed=number) for number in range(8)]
        asked = [asyncio.create_task(pool.ask(question)) for question in questions]
        await asyncio.sleep(0.5)
        for name in tuple(pool.replicas):
            await pool.replicas[name].kill()
        for name in tuple(pool.replicas):
            await pool.spawn(name)
        records = await asyncio.gather(*asked)
    assert [record for record in records if not record.is_right] == []


async def test_a_place_whose_processes_keep_dying_at_their_start_disturbs_nobody() -> None:
    async with chaos_pool(2, step_s=0.005) as pool:
        async with load(pool, 2) as records:
            for _ in range(3):
                # Its engine ends in the canary.
                doomed = await pool.spawn("r2", crash_after_steps=0)
                assert await asyncio.wait_for(doomed.process.wait(), 30) == 70
        assert [record for record in records if not record.is_right] == []
        assert {record.attempts for record in records} == {1}
