"""Policies of the config, through a real pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.client import AsyncGraphpoolClient
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, ONE_TRY, ScriptPool, script_pool
from tests.fakes.waiting import until

START = tuple(range(10, 74))
"""As many tokens as are compared."""


async def replica_of(pool: ScriptPool, prompt: tuple[int, ...], max_tokens: int = 3) -> str:
    answer = await pool.client.generate(prompt, max_tokens=max_tokens, seed=1)
    assert answer.execution is not None
    return answer.execution.replica


async def test_prompts_that_begin_alike_go_to_one_replica_and_others_elsewhere() -> None:
    async with script_pool(4, router=replace(FAST, policy="prefix")) as pool:
        homes: list[str] = []
        for family in range(12):
            prompts = [(family + 100, *START[1:], tail) for tail in range(100, 105)]
            found = set()
            for prompt in prompts:
                await pool.wait_idle()
                found.add(await replica_of(pool, prompt))
            homes += found
            assert len(found) == 1
    assert len(set(homes)) >= 3


async def test_a_prefix_that_everybody_sends_spreads_over_the_pool() -> None:
    async with script_pool(4, router=replace(FAST, policy="prefix"), knobs=ScriptKnobs(step_s=0.01)) as pool:
        used = await asyncio.gather(*(replica_of(pool, (*START, tail), 20) for tail in range(100, 132)))
    assert len(set(used)) == 4
    assert max(used.count(name) for name in set(used)) <= 2 * 32 / 4 + 1


async def test_tier_fit_takes_the_replica_that_can_start_the_request_now() -> None:
    async with script_pool(2, router=replace(FAST, policy="tier-fit"), knobs=ScriptKnobs(step_s=0.01)) as pool:
        full, roomy = pool.replicas
        full.engine.knobs.max_rows = 1
        async with (
            AsyncGraphpoolClient(full.server.address, ONE_TRY) as near,
            AsyncGraphpoolClient(roomy.server.address, ONE_TRY) as far,
        ):
            # Little to do, but no free row; much to do, and free rows.
            held = asyncio.create_task(near.generate((1, 2), max_tokens=300, seed=1))
            busy = asyncio.create_task(far.generate((1, 2), max_tokens=2000, seed=1))
            await until(lambda: full.engine.load().running == roomy.engine.load().running == 1)
            reported = {one.server.name: 1 for one in pool.replicas}
            await until(lambda: {load.replica: load.load.running for load in pool.router.pool.loads()} == reported)
            assert {await replica_of(pool, (5, 6)) for _ in range(4)} == {roomy.server.name}
            held.cancel()
            busy.cancel()
