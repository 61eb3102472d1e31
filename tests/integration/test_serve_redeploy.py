"""A pool is deployed again: replicas are replaced when what they are made of has changed, and only then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest

from tests.fakes.served_script import ServedPool, apply_config, ray_of_pools, served_pool

from cluster.autoscale.config import ScalingConfig  # isort: skip
from cluster.config import RouterConfig
from cluster.private_ray import PrivateRay
from tests.fakes.script import script
from tests.fakes.script_pool import script_pool
from tests.fakes.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROUTER = RouterConfig(
    wait_for_replica_s=120.0, wait_to_resume_s=60.0, announce_period_s=0.2, reconnect_max_s=0.5, canary_timeout_s=10.0
)
SCALING = ScalingConfig(min_replicas=1, max_replicas=3, decide_every_s=0.5, down_after_s=120.0)
KNOBS: dict[str, Any] = {"step_s": 0.02, "max_rows": 4}
SETTLED_S = 3.0
"""Serve has looked at a changed config many times within it."""
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


class Clients:
    """They ask one after the other, check every token, and note how many replicas were ready."""

    def __init__(self, pool: ServedPool, count: int) -> None:
        self.pool = pool
        self.num_answers = 0
        self.least_ready = len(pool.ready)
        self._is_over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]
        self._tasks.append(asyncio.create_task(self._look()))

    async def end(self) -> None:
        """Let all finish; raises what went wrong for any of them."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)
        assert self.num_answers > 0

    async def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            prompt = [5, 6, number, self.num_answers]
            answer = await self.pool.client.generate(prompt, max_tokens=60, temperature=0.0)
            assert answer.choices[0].token_ids == script(prompt, 0, 0, 60)
            self.num_answers += 1

    async def _look(self) -> None:
        while not self._is_over.is_set():
            self.least_ready = min(self.least_ready, len(self.pool.ready))
            await asyncio.sleep(0.02)


def incarnations(pool: ServedPool) -> set[str]:
    return set(pool.ready.values())


def is_whole(pool: ServedPool, count: int, gone: set[str]) -> bool:
    return len(pool.ready) == count and not gone & incarnations(pool)


async def deployed(pool: ServedPool, num_replicas: int, **options: Any) -> set[str]:
    """Of a new pool."""
    await pool.deploy(num_replicas=num_replicas, **KNOBS, **options)
    await pool.running(num_replicas)
    return incarnations(pool)


async def test_another_number_and_scaling_leave_running_replicas_alone(pool: ServedPool) -> None:
    first = await deployed(pool, 2)
    clients = Clients(pool, 4)

    await pool.deploy(num_replicas=3, **KNOBS)
    await until(lambda: len(pool.ready) == 3, WAIT_S)
    assert first < incarnations(pool)

    three = incarnations(pool)
    await pool.deploy(scaling=SCALING, **KNOBS)
    await asyncio.sleep(SETTLED_S)
    assert incarnations(pool) == three, "a pool that runs is scaled from what it has"

    await pool.deploy(num_replicas=2, drain_timeout_s=9.0, **KNOBS)
    await until(lambda: len(pool.ready) == 2, WAIT_S)
    two = incarnations(pool)
    assert two < three

    await pool.deploy(num_replicas=1, drain_timeout_s=9.0, **KNOBS)
    await until(lambda: len(pool.ready) == 1, WAIT_S)
    await asyncio.sleep(SETTLED_S)
    assert incarnations(pool) < two
    await clients.end()
    assert clients.least_ready >= 1


async def test_what_replicas_are_made_of_replaces_them_one_after_the_other(pool: ServedPool) -> None:
    first = await deployed(pool, 2)
    clients = Clients(pool, 4)
    await pool.deploy(num_replicas=2, **KNOBS, max_waiting=100)
    await until(partial(is_whole, pool, 2, first), WAIT_S)
    await clients.end()
    assert clients.least_ready == 1


async def test_with_room_for_it_a_successor_is_ready_before_the_old_one_goes(pool: ServedPool) -> None:
    before = await deployed(pool, 1, surge=None)
    clients = Clients(pool, 2)
    names = set(pool.ready)
    for turn in range(3):
        await pool.deploy(num_replicas=1, surge=None, **KNOBS, max_waiting=100 + turn)
        await until(partial(is_whole, pool, 1, before), WAIT_S)
        before = incarnations(pool)
        names |= set(pool.ready)
    await clients.end()
    assert clients.least_ready == 1, "at no time was there no replica"
    assert names == {"replica-0", "replica-1"}


async def test_a_successor_that_cannot_start_takes_no_replica_away(pool: ServedPool) -> None:
    first = await deployed(pool, 1, surge=True)
    clients = Clients(pool, 2)
    await pool.deploy(surge=True, **KNOBS, no_such_knob=1)
    await asyncio.sleep(3 * SETTLED_S)
    assert incarnations(pool) == first
    await pool.deploy(surge=True, **KNOBS, max_waiting=100)
    await until(partial(is_whole, pool, 1, first), WAIT_S)
    await clients.end()
    assert clients.least_ready == 1


async def test_without_room_the_old_replica_goes_first_and_requests_wait(pool: ServedPool) -> None:
    first = await deployed(pool, 1, surge=None, num_cpus=1.2)
    clients = Clients(pool, 2)
    await pool.deploy(surge=True, num_cpus=1.2, **KNOBS, max_waiting=100)
    await asyncio.sleep(SETTLED_S)
    assert incarnations(pool) == first, "its successor waits for a place, as it was told to"
    await pool.deploy(surge=None, num_cpus=1.2, **KNOBS, max_waiting=101)
    await until(partial(is_whole, pool, 1, first), WAIT_S)
    await clients.end()
    assert clients.least_ready == 0


async def test_a_replica_that_comes_later_takes_no_name_from_one_that_runs(pool: ServedPool) -> None:
    first = await deployed(pool, 1, surge=True)
    clients = Clients(pool, 2)
    await pool.deploy(surge=True, **KNOBS, max_waiting=100)
    await until(partial(is_whole, pool, 1, first), WAIT_S)
    (name,) = pool.ready
    second = incarnations(pool)
    assert name == "replica-1", "its rank was that, beside the old one; now it has the old one's"
    await asyncio.sleep(SETTLED_S)

    await pool.deploy(num_replicas=2, surge=True, **KNOBS, max_waiting=100)
    await until(lambda: len(pool.ready) == 2, WAIT_S)
    assert second < incarnations(pool)
    assert set(pool.ready) == {"replica-0", "replica-1"}
    await clients.end()
    assert clients.least_ready == 1


async def test_a_config_file_is_applied_as_a_program_does(pool: ServedPool) -> None:
    first = await deployed(pool, 2)
    replica = {"routers": [pool.router.address], "announce_period_s": 0.2}
    values = {"num_replicas": 2, "replica": replica, "knobs": KNOBS, "surge": False, "drain_timeout_s": 20.0}
    scaled = {**values, "scaling": asdict(SCALING)}
    clients = Clients(pool, 4)

    for same in (values, values, scaled, scaled, values):
        await pool.ray.call(apply_config, same)
        await asyncio.sleep(SETTLED_S)
        assert incarnations(pool) == first

    await pool.ray.call(apply_config, {**values, "num_replicas": 3})
    await until(lambda: len(pool.ready) == 3, WAIT_S)
    assert first < incarnations(pool)

    before = incarnations(pool)
    await pool.ray.call(apply_config, {**values, "num_replicas": 3, "knobs": {**KNOBS, "max_waiting": 100}})
    await until(partial(is_whole, pool, 3, before), WAIT_S)
    await clients.end()
    assert clients.least_ready >= 1


async def test_another_list_of_routers_leaves_replicas_and_running_answers_alone(pool: ServedPool) -> None:
    first = await deployed(pool, 2)
    prompt, mine = [5, 6, 7], pool.router.address
    async with script_pool(0, router=replace(ROUTER, listen="127.0.0.1:0")) as other:
        stream = pool.client.stream(prompt, max_tokens=500, seed=1)
        pieces = [await anext(stream)]
        await pool.deploy(num_replicas=2, routers=(mine, other.router.address), **KNOBS)
        began_s = time.monotonic()
        await until(lambda: other.num_ready == 2, 20)
        assert time.monotonic() - began_s < 10
        replica = {"routers": [other.router.address], "announce_period_s": 0.2}
        values = {"num_replicas": 2, "replica": replica, "knobs": KNOBS, "surge": False, "drain_timeout_s": 20.0}
        await pool.ray.call(apply_config, values)
        await until(lambda: not pool.ready, 20)
        pieces += [piece async for piece in stream]
        assert tuple(token for piece in pieces for token in piece.token_ids) == script(prompt, 1, 0, 500)
        assert {piece.execution.attempts for piece in pieces if piece.execution} == {1}
        await until(lambda: not pool.router.pool.loads(), 20)
        assert {load.incarnation for load in other.router.pool.loads()} == first
        assert (await other.client.generate(prompt, max_tokens=4, seed=2)).token_ids == script(prompt, 2, 0, 4)
        await pool.deploy(scaling=replace(SCALING, min_replicas=3), routers=(mine,), **KNOBS)
        await until(lambda: len(pool.ready) == 3, WAIT_S)
        assert first < incarnations(pool)
