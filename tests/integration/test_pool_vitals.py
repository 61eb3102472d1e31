"""Replicas that hang, freeze, fail or slow down, as the router sees them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import replace

import pytest

from cluster.client import Answer, AsyncAnswerStream, CallError, Unavailable
from protos import control_pb2
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
NEVER_S = 3600.0
LOAD_S = 1.5
"""Scheduling delay of a machine that is busy with other things, on top of every bound."""
OPEN, CLOSED = control_pb2.BREAKER_OPEN, control_pb2.BREAKER_CLOSED


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    return [piece async for piece in stream]


def load_of(pool: ScriptPool, index: int) -> control_pb2.ReplicaLoad:
    name = pool.replicas[index].server.name
    return next(load for load in pool.router.pool.loads() if load.replica == name)


async def test_a_replica_without_progress_is_out_within_three_seconds_and_back_after_a_canary() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.005, stall_s=NEVER_S)) as pool:
        stuck, other = pool.replicas
        streams = [asyncio.create_task(pool.client.generate(PROMPT, max_tokens=2000, seed=s)) for s in range(2)]
        await until(lambda: all(one.server.num_live == 1 for one in pool.replicas))
        stuck.engine.knobs.is_hanging = True
        hung_s = time.monotonic()
        await until(lambda: load_of(pool, 0).breaker != CLOSED, 10)
        assert 1.9 < time.monotonic() - hung_s < 3.0 + LOAD_S
        assert load_of(pool, 1).breaker == CLOSED
        answers = [await pool.client.generate(PROMPT, max_tokens=3, seed=1) for _ in range(4)]
        assert {answer.execution.replica for answer in answers if answer.execution} == {other.server.name}
        stuck.engine.knobs.is_hanging = False
        await until(lambda: load_of(pool, 0).breaker == CLOSED, 20)
        await until(lambda: len(stuck.engine.load().tiers) > 0 and stuck.engine.load().running == 0)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_a_replica_that_is_capturing_may_take_its_time() -> None:
    async with script_pool(1, knobs=ScriptKnobs(stall_s=NEVER_S, is_preparing=True)) as pool:
        (busy,) = pool.replicas
        busy.engine.knobs.is_hanging = True
        answer = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=4, seed=2))
        await asyncio.sleep(3.0)
        assert load_of(pool, 0).breaker == CLOSED
        busy.engine.knobs.is_hanging = False
        assert (await answer).token_ids == script(PROMPT, 2, 0, 4)


async def test_a_frozen_process_is_out_within_three_seconds_and_its_late_tokens_reach_nobody() -> None:
    async with script_pool(0, router=replace(FAST, resume_budget=0)) as pool:
        frozen = await pool.spawn("frozen", step_s=0.01)
        stream = pool.client.stream(PROMPT, max_tokens=3000, seed=5)
        received = list((await anext(stream)).token_ids)
        frozen.send(signal.SIGSTOP)
        frozen_s = time.monotonic()
        await until(lambda: pool.num_ready == 0, 10)
        assert time.monotonic() - frozen_s < 3.0 + LOAD_S
        frozen.send(signal.SIGCONT)
        with contextlib.suppress(CallError):
            async for piece in stream:
                received += piece.token_ids
        await pool.router.wait_ready(timeout_s=10)
        assert tuple(received) == script(PROMPT, 5, 0, len(received))
        assert (await pool.client.generate(PROMPT, max_tokens=3, seed=1)).token_ids == script(PROMPT, 1, 0, 3)


async def test_internal_errors_open_the_breaker_of_one_replica_but_never_the_last_ones() -> None:
    async with script_pool(2, knobs=ScriptKnobs(fail_on_prompt=PROMPT)) as pool:
        for _ in range(40):
            with pytest.raises(CallError):
                await pool.client.generate(PROMPT, max_tokens=20)
        breakers = [load_of(pool, index).breaker for index in range(2)]
        assert CLOSED in breakers
        assert pool.router.pool.has_ready
        assert (await pool.client.generate((1, 2), max_tokens=3, seed=1)).token_ids == script((1, 2), 1, 0, 3)


async def test_a_replica_five_times_slower_is_derated_within_five_seconds() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.02)) as pool:
        slow = pool.replicas[0]
        is_over = False

        async def keep_asking(seed: int) -> None:
            while not is_over:
                await pool.client.generate(PROMPT, max_tokens=20, seed=seed)

        askers = [asyncio.create_task(keep_asking(seed)) for seed in range(8)]
        await asyncio.sleep(1.0)
        await until(lambda: load_of(pool, 0).slowness < 1.5, 20)
        slow.engine.knobs.step_s = 0.1
        slowed_s = time.monotonic()
        await until(lambda: load_of(pool, 0).slowness > 3, 20)
        assert time.monotonic() - slowed_s < 5 + LOAD_S
        await until(lambda: load_of(pool, 0).router_streams < load_of(pool, 1).router_streams)
        is_over = True
        await asyncio.gather(*askers)


async def test_with_nobody_else_the_requests_of_a_hung_replica_end_unavailable() -> None:
    async with script_pool(1, knobs=ScriptKnobs(stall_s=NEVER_S)) as pool:
        stream = pool.client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        pool.replicas[0].engine.knobs.is_hanging = True
        with pytest.raises(Unavailable):
            await asyncio.wait_for(read(stream), 15)
