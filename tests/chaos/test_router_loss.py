"""Routers that are killed while they answer: clients that know another one go on there."""

from __future__ import annotations

import asyncio
import random
import time

from cluster.client import AsyncGraphpoolClient
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Question, Record, ask, random_question, watch
from tests.fakes.router_process import spawn_router

RECONNECT_S = 1.0
LOAD_S = 1.5
"""Scheduling delay of a busy machine with two cores, on top of the bound."""


async def answer(client: AsyncGraphpoolClient, question: Question) -> Record:
    async with ask(client, question) as stream:
        return await watch(question, stream, patience_s=30)


def clients_of(pool: ChaosPool, count: int) -> list[AsyncGraphpoolClient]:
    return [AsyncGraphpoolClient(targets=[router.address for router in pool.routers]) for _ in range(count)]


async def test_the_answers_of_a_killed_router_go_on_through_another_one() -> None:
    draw = random.Random(1)
    async with chaos_pool(2, num_routers=2, step_s=0.01) as pool:
        clients = clients_of(pool, 4)
        questions = [random_question(draw, max_tokens=150) for _ in range(24)]
        questions += [Question(prompt=(14, number + 3), max_tokens=150, seed=number, n=2) for number in range(8)]
        asked = [asyncio.create_task(answer(clients[n % 4], question)) for n, question in enumerate(questions)]
        await asyncio.sleep(0.5)
        await pool.routers[0].kill()
        records = await asyncio.gather(*asked)
        for client in clients:
            await client.close()
    assert [record for record in records if not record.is_right] == []
    longest_s = max(record.longest_gap_s for record in records)
    print(f"longest gap {longest_s:.2f} s")
    assert longest_s < RECONNECT_S + LOAD_S


async def test_what_outlasts_the_grace_of_a_router_goes_on_through_another_one() -> None:
    async with chaos_pool(2, num_routers=2, step_s=0.01) as pool:
        (client,) = clients_of(pool, 1)
        questions = [Question(prompt=(15, number + 3), max_tokens=200, seed=number, n=2) for number in range(8)]
        asked = [asyncio.create_task(answer(client, question)) for question in questions]
        await asyncio.sleep(0.5)
        await pool.client.drain(grace_s=0.2)
        records = await asyncio.gather(*asked)
        await client.close()
    assert [record for record in records if not record.is_right] == []
    assert max(record.longest_gap_s for record in records) < RECONNECT_S + LOAD_S


async def test_routers_that_are_killed_in_turn_while_replicas_are_killed_too_lose_nothing() -> None:
    async with chaos_pool(3, num_routers=2, step_s=0.005) as pool:
        clients = clients_of(pool, 4)
        until_s, records = time.monotonic() + 4.0, []

        async def ask_on(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < until_s:
                records.append(await answer(clients[number % 4], random_question(draw)))

        asking = [asyncio.create_task(ask_on(number)) for number in range(16)]
        for turn in range(2):
            await asyncio.sleep(0.7)
            victim = pool.routers[turn % 2]
            port = victim.address.rpartition(":")[2]
            await victim.kill()
            await pool.replicas[f"r{turn}"].kill()
            pool.routers[turn % 2] = await spawn_router({"listen": f"127.0.0.1:{port}", "announce_period_s": 0.2})
            await pool.spawn(f"r{turn}")
            await asyncio.sleep(0.7)
        await asyncio.gather(*asking)
        for client in clients:
            await client.close()
    assert len(records) > 50
    assert [record for record in records if not record.is_right] == []
