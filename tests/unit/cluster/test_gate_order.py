"""Criticality and deadlines where requests of tenants wait."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.criticality import use_criticality
from cluster.errors import Overloaded
from cluster.router.fair_queue import FairGate, FairQueue
from worker.request import Criticality


@given(st.lists(st.integers(1, 4), max_size=40))
def test_of_one_tenant_the_highest_rank_goes_first_and_of_a_rank_the_first_that_came(ranks: list[int]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number, rank in enumerate(ranks):
        queue.push("a", 1.0, (-rank, number), rank=rank)
    assert [queue.pop() for _ in ranks] == sorted((-rank, number) for number, rank in enumerate(ranks))


def test_another_tenants_flood_is_ahead_only_in_turns() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.push("heavy", 1.0, number, rank=3)
    for number in range(4):
        queue.push("light", 1.0, number, rank=2)
    assert queue.num_ahead("light", 3) == 0 + 1
    assert queue.num_ahead("light", 2) == 4 + 5
    assert queue.num_ahead("heavy", 3) == 1000 + 4
    assert queue.num_ahead("new", 3) == 1 + 1


async def test_what_would_wait_too_long_is_refused_before_it_waits() -> None:
    asked: list[tuple[int, int, float | None]] = []

    def check_wait(num_ahead: int, rows: int, timeout_s: float | None) -> None:
        asked.append((num_ahead, rows, timeout_s))
        if num_ahead >= 1:
            raise Overloaded("too_late", 1.0)

    gate = FairGate(lambda: 1, check_wait=check_wait)

    async def hold(seconds: float) -> None:
        async with gate.turn("a", cost=1.0, rows=1, timeout_s=5.0):
            await asyncio.sleep(seconds)

    first = asyncio.create_task(hold(0.1))
    await asyncio.sleep(0)
    second = asyncio.create_task(hold(0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await hold(0)
    await asyncio.gather(first, second)
    assert asked == [(0, 1, 5.0), (1, 1, 5.0)]
    assert (gate.num_waiting, gate.num_rows) == (0, 0)


async def test_the_criticality_of_the_call_is_the_rank() -> None:
    gate, order = FairGate(lambda: 1), list[str]()

    async def ask(criticality: Criticality) -> None:
        use_criticality(criticality)
        async with gate.turn("a", cost=1.0, rows=1):
            order.append(criticality.name)
            await asyncio.sleep(0)

    async with gate.turn("a", cost=1.0, rows=1):
        tasks = [asyncio.create_task(ask(one)) for one in Criticality]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == [one.name for one in sorted(Criticality, reverse=True)]
