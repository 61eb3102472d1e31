"""Replicas that stand still, and connections that carry nothing: found in time, and nothing of any answer is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable

import pytest

from protos import control_pb2, fault_pb2
from tests.chaos.chaos_pool import ChaosPool, chaos_pool, proxied_pool
from tests.chaos.oracle import Question, Record
from tests.chaos.tcp_proxy import TcpProxy

STEP_S = 0.02
LOAD_S = 1.5
"""Scheduling delay of a busy machine with two cores, on top of every bound."""
HANG_S = 3.0
PARTITION_S = 4.0
RESET_S = 1.0


def questions(count: int, seed: int) -> list[Question]:
    """Answers of two seconds: long enough to be under way when something happens."""
    draw = random.Random(seed)
    return [
        Question(
            prompt=(5, 6, draw.randrange(3, 500), number + 3),
            max_tokens=100,
            seed=draw.randrange(999),
            n=1 + number % 2,
        )
        for number in range(count)
    ]


async def under_way(pool: ChaosPool, seed: int, count: int = 16) -> list[asyncio.Task[Record]]:
    """Streams that have begun, on both replicas."""
    asked = [asyncio.create_task(pool.ask(question)) for question in questions(count, seed)]
    await asyncio.sleep(0.5)
    return asked


async def check(asked: list[asyncio.Task[Record]], bound_s: float) -> list[Record]:
    """All right, and no gap longer than that; returns those that were moved."""
    records = await asyncio.gather(*asked)
    assert [record for record in records if not record.is_right] == []
    moved = [record for record in records if record.attempts > 1]
    longest_s = max(max(record.longest_gap_s, record.first_token_s or 0.0) for record in records)
    print(f"{len(moved)} of {len(records)} answers moved, longest gap {longest_s:.2f} s")
    assert longest_s < bound_s + LOAD_S
    return moved


async def test_a_frozen_replica_is_found_and_what_it_says_when_it_thaws_is_not_heard() -> None:
    async with chaos_pool(2, step_s=STEP_S) as pool:
        asked = await under_way(pool, 1)
        pool.replicas["r0"].send(signal.SIGSTOP)
        assert await check(asked, HANG_S)
        # Now it goes on with answers that were finished elsewhere, while others are under way.
        asked = [asyncio.create_task(pool.ask(question)) for question in questions(16, 2)]
        pool.replicas["r0"].send(signal.SIGCONT)
        await check(asked, HANG_S)
        await pool.wait_ready(2)
        await pool.wait_idle()


async def test_replicas_that_stand_still_inside_are_found() -> None:
    kinds = ("hang_engine", "stall_mailbox", "block_event_loop")
    async with chaos_pool(4, step_s=STEP_S, stall_s=2.0) as pool:
        asked = await under_way(pool, 3, 24)
        for name, kind in zip(pool.replicas, kinds, strict=False):
            await pool.inject(name, **{kind: fault_pb2.HangFault(duration_s=8.0)})
        assert len(await check(asked, HANG_S)) >= 12


BREAKS: dict[str, tuple[tuple[Callable[[TcpProxy], None], ...], float]] = {
    "silent": (
        (TcpProxy.blackhole, lambda proxy: proxy.blackhole(to_target=False), TcpProxy.half_open),
        PARTITION_S,
    ),
    "deaf": ((lambda proxy: proxy.blackhole(from_target=False),), PARTITION_S),
    "reset": ((TcpProxy.reset,), RESET_S),
}


@pytest.mark.parametrize("kind", BREAKS)
async def test_broken_connections_are_found_and_taken_up_again_when_they_heal(kind: str) -> None:
    breaks, bound_s = BREAKS[kind]
    num_replicas = len(breaks) + 1
    async with proxied_pool(num_replicas, step_s=STEP_S) as pool:
        asked = await under_way(pool, 4, 8 * num_replicas)
        for name, break_ in zip(pool.proxies, breaks, strict=False):
            break_(pool.proxies[name])
        more = [asyncio.create_task(pool.ask(question)) for question in questions(8, 5)]
        moved = await check([*asked, *more], bound_s)
        assert len(moved) >= 2
        for proxy in pool.proxies.values():
            proxy.heal()
        await pool.wait_ready(num_replicas, timeout_s=15)
        await check([asyncio.create_task(pool.ask(question)) for question in questions(4, 6)], RESET_S)
        # Nothing of the lost streams is left on a replica.
        await pool.wait_idle()


async def test_a_slow_and_jittery_connection_is_no_reason_to_eject_a_replica() -> None:
    async with proxied_pool(2, step_s=STEP_S) as pool:
        draw, until_s = random.Random(7), time.monotonic() + 6
        pool.proxies["r0"].delay(0.2)

        async def jitter() -> None:
            while time.monotonic() < until_s:
                pool.proxies["r0"].delay(draw.uniform(0.05, 0.2))
                await asyncio.sleep(0.05)

        async def ejected() -> int:
            count = 0
            while time.monotonic() < until_s:
                load = (await pool.loads())["r0"]
                count += load.state != control_pb2.REPLICA_STATE_READY
                await asyncio.sleep(0.1)
            return count

        trouble = asyncio.create_task(jitter())
        watching = asyncio.create_task(ejected())
        moved: list[Record] = []
        for seed in (8, 9):
            moved += await check(await under_way(pool, seed), 1.0)
        await trouble
        assert await watching == 0
        assert moved == []
