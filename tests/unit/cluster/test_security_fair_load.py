"""S18 in virtual time: what a tenant at ten times its share does to the others, without the noise of a machine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from cluster.errors import QuotaExceeded
from cluster.router.fair_queue import FairGate
from tests.fakes.virtual_time import run_virtually

QUIET = ("acme", "globex")
WARM_UP_S = 20.0
Turn = Callable[[str], AbstractAsyncContextManager[None]]


class FirstComeFirstServed:
    """What there would be without turns."""

    def __init__(self, rows: int) -> None:
        self._rows = asyncio.Semaphore(rows)

    @contextlib.asynccontextmanager
    async def turn(self, _: str) -> AsyncIterator[None]:
        async with self._rows:
            yield


async def p99_of_the_quiet(rows: int, noise: float, *, is_fair: bool, seconds: float) -> float:
    """Of their answers, 1 s each on average, while each of three tenants asks for a fifth of the pool, one `noise` times that."""
    loop, dice, took = asyncio.get_running_loop(), random.Random(rows), []
    gate = FairGate(lambda: rows, max_waiting=200, clock=loop.time)
    turn: Turn = (lambda name: gate.turn(name, cost=60, rows=1)) if is_fair else FirstComeFirstServed(rows).turn

    async def ask(name: str) -> None:
        began_s = loop.time()
        with contextlib.suppress(QuotaExceeded):
            async with turn(name):
                await asyncio.sleep(dice.uniform(0.5, 1.5))
            if name in QUIET and began_s > WARM_UP_S:
                took.append(loop.time() - began_s)

    async def tenant(name: str, per_s: float) -> None:
        asked = []
        while loop.time() < seconds:
            asked.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(dice.expovariate(per_s))
        if name not in QUIET:
            for one in asked:
                one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    await asyncio.gather(tenant("noisy", noise * rows / 5), *(tenant(name, rows / 5) for name in QUIET))
    return sorted(took)[int(0.99 * len(took))]


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_s18_the_others_p99_grows_by_a_fifth_at_most(rows: int) -> None:
    calm, beside = (run_virtually(p99_of_the_quiet(rows, noise, is_fair=True, seconds=120)) for noise in (1, 10))
    assert beside <= 1.2 * calm


def test_s18_without_turns_the_others_would_wait_behind_all_of_it() -> None:
    calm, beside = (run_virtually(p99_of_the_quiet(32, noise, is_fair=False, seconds=60)) for noise in (1, 10))
    assert beside > 10 * calm
