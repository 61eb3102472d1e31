"""A request that ends every replica that computes it."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.client import InternalError
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Outcome, Question, Record

POISON = Question(prompt=(66, 6, 66), max_tokens=60, temperature=0.0)


def innocents(count: int) -> list[Question]:
    draw = random.Random(count)
    return [
        Question(prompt=(draw.randrange(3, 500), 7, number + 3), max_tokens=120, seed=number, n=1 + number % 3 // 2)
        for number in range(count)
    ]


async def deaths(pool: ChaosPool) -> int:
    return sum(replica.process.returncode is not None for replica in pool.replicas.values())


@pytest.mark.parametrize(("kind", "after_tokens"), [("kill", 25), ("crash_engine", 0)])
async def test_a_poisonous_request_takes_two_replicas_along_and_nobody_else(kind: str, after_tokens: int) -> None:
    async with chaos_pool(3, step_s=0.01) as pool:
        for name in pool.replicas:
            await pool.inject(name, **{kind: {"prompt_token_ids": POISON.prompt, "after_tokens": after_tokens}})
        asked = [asyncio.create_task(pool.ask(question)) for question in innocents(64)]
        await asyncio.sleep(0.2)
        poisoned = await pool.ask(POISON)
        records: list[Record] = await asyncio.gather(*asked)
        assert [record for record in records if not record.is_right] == []
        assert poisoned.outcome is Outcome.FAILED
        assert isinstance(poisoned.error, InternalError)
        assert poisoned.violations == []
        assert await deaths(pool) <= 2
        # Whoever asks the same again is refused at once, and nothing more dies.
        before = await deaths(pool)
        again = await asyncio.wait_for(pool.ask(POISON), 5)
        assert isinstance(again.error, InternalError)
        assert await deaths(pool) == before
        assert (await pool.ask(innocents(1)[0])).is_right
