"""A GPU on which every process ends soon, and whatever watches over processes starts the next one there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Record, random_question
from tests.fakes.scrape import scrape

GPU = "GPU-bad"
NUM_ASKERS = 12
LASTS_STEPS = 60
"""How long an engine lasts there."""
PAUSE_S = 0.5


@dataclass(slots=True)
class BadGpu:
    """Processes of two names in turn: the place is known by the GPU."""

    pool: ChaosPool
    moved: list[float] = field(default_factory=list)
    """Placements that were repeated by the end of each process."""
    metrics: str = ""
    is_over: bool = False

    async def run(self) -> None:
        number = 0
        while not self.is_over:
            process = await self.pool.spawn(f"bad-{number % 2}", gpu=GPU, crash_after_steps=LASTS_STEPS)
            await process.process.wait()
            await asyncio.sleep(0.3)
            self.moved.append((await scrape(self.metrics)).value("repeated_placements_total"))
            number += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        work = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self.is_over = True
            while not work.done():  # what is being started is known once it has started
                for name in [name for name in self.pool.replicas if name.startswith("bad")]:
                    await self.pool.replicas[name].kill()
                await asyncio.wait((work,), timeout=0.5)
            work.result()


async def ask_on(pool: ChaosPool, records: list[Record], number: int, is_over: asyncio.Event) -> None:
    draw = random.Random(number)
    while not is_over.is_set():
        records.append(await pool.ask(random_question(draw)))


async def test_each_round_costs_less_often_and_a_few_answers_and_nobody_loses_or_is_blamed_for_anything() -> None:
    metrics = free_address()
    router = {"metrics_listen": metrics, "place_pause_min_s": PAUSE_S, "place_pause_max_s": 60.0}
    async with chaos_pool(2, router=router, step_s=0.005) as pool:
        records: list[Record] = []
        is_over = asyncio.Event()
        asking = [asyncio.create_task(ask_on(pool, records, number, is_over)) for number in range(NUM_ASKERS)]
        bad = BadGpu(pool, metrics=metrics)
        async with bad.running():
            async with asyncio.timeout(150):
                while len(bad.moved) < 5:  # noqa: ASYNC110  # what happens is in other processes
                    await asyncio.sleep(0.1)
            seen = await scrape(metrics)
            is_over.set()
            await asyncio.gather(*asking)
    assert len(records) > 50
    assert [record for record in records if not record.is_right] == []
    assert seen.value("poisoned_requests_total") == 0
    assert seen.by_labels("bad_ends", "place")[(GPU,)] >= 5
    costs = [after - before for before, after in zip(bad.moved[1:], bad.moved[2:], strict=False)]
    print(f"moved by each process: {bad.moved}")
    assert max(costs) <= 4, "two streams at a time, and those that were tried alone"


async def test_the_only_replica_of_a_pool_is_taken_back_at_once_however_often_it_ended() -> None:
    async with chaos_pool(1, router={"place_pause_min_s": 60.0, "place_pause_max_s": 60.0}) as pool:
        for _ in range(3):
            await pool.replicas["r0"].kill()
            await pool.spawn("r0")
            began_s = time.monotonic()
            await pool.wait_ready(1)
            assert time.monotonic() - began_s < 30
            assert (await pool.ask(random_question(random.Random(1)))).is_right


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"
