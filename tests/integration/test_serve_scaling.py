"""Ray Serve for real: replicas come and go with load, drain before they go, and are replaced without a lost token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from tests.fakes.served_script import ServedPool, ray_of_pools, served_pool

from cluster.autoscale.config import ScalingConfig  # isort: skip
from cluster.config import RouterConfig
from cluster.private_ray import PrivateRay
from tests.fakes.script import script
from tests.fakes.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROUTER = RouterConfig(
    wait_for_replica_s=120.0, wait_to_resume_s=60.0, announce_period_s=0.2, reconnect_max_s=0.5, canary_timeout_s=10.0
)
SCALING = ScalingConfig(
    min_replicas=1, max_replicas=3, target_occupancy=1.0, decide_every_s=0.5, down_after_s=4.0, replica_start_s=30.0
)
KNOBS: dict[str, Any] = {"step_s": 0.02, "max_rows": 4}
WAIT_S = 120.0
"""For replicas to come or go on a machine that others use too."""


@pytest.fixture(scope="module")
def ray() -> Iterator[PrivateRay]:
    with ray_of_pools() as started:
        yield started


@pytest.fixture
async def pool(ray: PrivateRay) -> AsyncIterator[ServedPool]:
    async with served_pool(ROUTER, ray) as made:
        yield made


class Load:
    """Clients that ask one after the other, and check every token."""

    def __init__(self, pool: ServedPool) -> None:
        self.pool = pool
        self.num_answers = 0
        self.attempts: list[int] = []
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def grow(self, num_clients: int, *, max_tokens: int = 60) -> None:
        first = len(self._tasks)
        self._tasks += [asyncio.create_task(self._ask(first + i, max_tokens)) for i in range(num_clients)]

    async def end(self) -> None:
        """Let all finish; raises what went wrong for any of them."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        self._is_over.clear()

    async def _ask(self, number: int, max_tokens: int) -> None:
        turn = 0
        while not self._is_over.is_set():
            prompt = [5, 6, number, turn]
            answer = await self.pool.client.generate(prompt, max_tokens=max_tokens, temperature=0.0)
            assert answer.choices[0].token_ids == script(prompt, 0, 0, max_tokens)
            assert answer.execution is not None
            self.attempts.append(answer.execution.attempts)
            self.num_answers += 1
            turn += 1


async def test_replicas_come_with_a_step_of_load_and_drain_when_it_is_over(pool: ServedPool) -> None:
    await pool.deploy(scaling=SCALING, **KNOBS)
    await until(lambda: len(pool.ready) == 1, WAIT_S)
    load = Load(pool)
    load.grow(1)
    await asyncio.sleep(5)
    assert len(pool.ready) == 1
    load.grow(11)
    began = time.monotonic()
    await until(lambda: len(pool.ready) == 3, WAIT_S)
    print(f"1 -> 3 replicas in {time.monotonic() - began:.1f} s")
    await asyncio.sleep(2)
    await load.end()
    load.grow(1)
    began = time.monotonic()
    await until(lambda: len(pool.ready) == 1, WAIT_S)
    print(f"3 -> 1 replicas in {time.monotonic() - began:.1f} s")
    await load.end()
    assert load.num_answers > 20
    assert set(load.attempts) == {1}, "a replica that is taken away finishes what it has"


async def test_an_idle_pool_goes_and_the_next_request_is_held_until_it_is_back(pool: ServedPool) -> None:
    scaling = ScalingConfig(min_replicas=0, max_replicas=2, decide_every_s=0.3, down_after_s=1.0, to_zero_after_s=2.0)
    await pool.deploy(scaling=scaling, **KNOBS)
    # Held, too: without a request the first replica would go again before a slow machine has started it.
    assert await answers(pool, [1, 2, 3])
    await until(lambda: not pool.ready, WAIT_S)
    began = time.monotonic()
    assert await answers(pool, [5, 6, 7])
    print(f"0 -> 1 replicas and an answer in {time.monotonic() - began:.1f} s")


async def answers(pool: ServedPool, prompt: list[int]) -> bool:
    answer = await pool.client.generate(prompt, max_tokens=5, temperature=0.0, timeout_s=WAIT_S)
    return answer.choices[0].token_ids == script(prompt, 0, 0, 5)


async def test_rolling_updates_lose_no_token(pool: ServedPool) -> None:
    await pool.deploy(num_replicas=2, **KNOBS)
    await pool.running(2)
    load = Load(pool)
    load.grow(4)
    for turn in range(2):
        before = set(pool.ready.values())
        await pool.deploy(num_replicas=2, **KNOBS, max_waiting=100 + turn)
        await until(partial(_is_whole, pool, 2, before), WAIT_S)
    await load.end()
    assert load.num_answers > 10


def _is_whole(pool: ServedPool, count: int, gone: set[str]) -> bool:
    return len(pool.ready) == count and not gone & set(pool.ready.values())


async def test_a_drain_past_its_grace_hands_its_answers_over(pool: ServedPool) -> None:
    await pool.deploy(num_replicas=2, drain_timeout_s=0.5, **KNOBS)
    await pool.running(2)
    load = Load(pool)
    load.grow(4, max_tokens=400)
    await asyncio.sleep(2)
    await pool.deploy(num_replicas=1, drain_timeout_s=0.5, **KNOBS)
    await until(lambda: len(pool.ready) == 1, WAIT_S)
    await load.end()
    assert max(load.attempts) >= 2
