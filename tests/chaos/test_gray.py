"""Replicas that work, but badly."""

from __future__ import annotations

import asyncio
import random
import time

from cluster.client import InternalError
from protos import fault_pb2
from tests.chaos.campaign import percentile
from tests.chaos.chaos_pool import ChaosPool, chaos_pool
from tests.chaos.oracle import Outcome, Question, Record

STEP_S = 0.01


async def ask_for(pool: ChaosPool, seconds: float, *, seed: int, clients: int = 8) -> list[Record]:
    """Closed loops of short questions."""
    until_s = time.monotonic() + seconds
    records: list[Record] = []

    async def ask_on(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while time.monotonic() < until_s:
            prompt = tuple(draw.randrange(3, 500) for _ in range(6))
            records.append(await pool.ask(Question(prompt=prompt, max_tokens=20, seed=draw.randrange(99))))

    await asyncio.gather(*(ask_on(number) for number in range(clients)))
    return records


async def test_a_replica_five_times_slower_is_given_less_and_never_ejected() -> None:
    async with chaos_pool(4, step_s=STEP_S) as pool:
        before = await ask_for(pool, 1.5, seed=1)
        await pool.inject("r0", slow_steps=fault_pb2.SlowFault(factor=5.0))
        started_s = time.monotonic()
        asking = asyncio.create_task(ask_for(pool, 3.0, seed=2))
        while (load := (await pool.loads())["r0"]).slowness < 2.5:
            await asyncio.sleep(0.05)
            assert time.monotonic() - started_s < 5.0, f"slowness {load.slowness}"
        derated_s = time.monotonic() - started_s
        await asking
        after = await ask_for(pool, 3.0, seed=3)
        states = {name: load.state for name, load in (await pool.loads()).items()}
    records = [*before, *after]
    assert [record for record in records if not record.is_right] == []
    share = sum("r0" in record.replicas for record in after) / len(after)
    ratio = percentile([record.first_token_s or 0.0 for record in after], 0.99) / percentile(
        [record.first_token_s or 0.0 for record in before], 0.99
    )
    print(f"derated after {derated_s:.1f} s, share {share:.3f} of 0.25, p99 of the first token {ratio:.2f}x")
    assert share < 0.12
    assert len(set(states.values())) == 1


async def test_a_row_of_nan_ends_its_request_and_no_other() -> None:
    async with chaos_pool(1, step_s=STEP_S) as pool:
        spoilt = Question(prompt=(8, 8, 8), max_tokens=60, seed=1)
        await pool.inject("r0", nan_row={"prompt_token_ids": spoilt.prompt, "after_tokens": 10, "times": 1})
        others = [Question(prompt=(8, 8, number + 9), max_tokens=60, seed=number, n=2) for number in range(16)]
        asked = [asyncio.create_task(pool.ask(question)) for question in (spoilt, *others)]
        failed, *records = await asyncio.gather(*asked)
        again = await pool.ask(spoilt)
    assert [record for record in records if not record.is_right] == []
    assert failed.outcome is Outcome.FAILED
    assert isinstance(failed.error, InternalError)
    assert (failed.violations, failed.num_tokens) == ([], 10)
    assert again.is_right
