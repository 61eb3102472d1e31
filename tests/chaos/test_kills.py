"""Replicas that are killed while they answer."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.chaos_pool import chaos_pool
from tests.chaos.oracle import Question, random_question


async def test_without_a_fault_every_answer_is_the_expected_one() -> None:
    draw = random.Random(1)
    async with chaos_pool(2) as pool:
        records = await asyncio.gather(*(pool.ask(random_question(draw)) for _ in range(100)))
    assert [record for record in records if not record.is_right] == []


async def test_a_replica_killed_at_any_token_loses_changes_and_repeats_nothing() -> None:
    async with chaos_pool(2, step_s=0.001) as pool:
        for after_tokens in (0, 1, 2, 7, 31, 62, 63):
            asked = Question(prompt=(9, 9, after_tokens + 3), max_tokens=64, seed=after_tokens, n=2)
            fault = {"prompt_token_ids": asked.prompt, "after_tokens": after_tokens, "times": 1}
            await pool.inject("r0", kill=fault)
            # Equal loads are taken in turn, so one of two is on each replica.
            records = await asyncio.gather(pool.ask(asked), pool.ask(asked))
            assert [record for record in records if not record.is_right] == [], after_tokens
            assert await pool.replicas["r0"].process.wait() == -9
            await pool.spawn("r0")
            await pool.wait_ready(2)
