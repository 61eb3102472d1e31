"""A request that ends the replica that computes it, among many that do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.client import Answer, AsyncAnswerStream, InternalError
from cluster.config import RouterConfig
from protos import fault_pb2, fault_pb2_grpc
from tests.fakes.replica_process import ReplicaProcess
from tests.fakes.scrape import scrape
from tests.fakes.script_engine import script
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.waiting import until

POISON = (66, 6)
PROMPT = (10, 20, 30)
STEP_S = 0.02
"""Long enough for a busy machine to keep up with the steps of three processes."""
NEVER_S = 3600.0
MEASURED = replace(FAST, metrics_listen="127.0.0.1:0")


@asynccontextmanager
async def pool_of_processes(
    count: int, *, kind: str = "kill", after_tokens: int = 0, router: RouterConfig = FAST
) -> AsyncIterator[tuple[ScriptPool, list[ReplicaProcess]]]:
    """Replicas that end when they compute POISON."""
    async with script_pool(0, router=router) as pool:
        processes = [
            await pool.spawn(f"r{place}", {"enable_fault_injection": True}, step_s=STEP_S, stall_s=NEVER_S)
            for place in range(count)
        ]
        fault: Any = fault_pb2.PromptFault(prompt_token_ids=POISON, after_tokens=after_tokens)
        for process in processes:
            async with grpc.aio.insecure_channel(process.address) as channel:
                await fault_pb2_grpc.FaultServiceStub(channel).Inject(fault_pb2.InjectRequest(**{kind: fault}))
        yield pool, processes


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    async with stream:
        return [piece async for piece in stream]


def ids(pieces: list[Answer]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


def num_dead(processes: list[ReplicaProcess]) -> int:
    return sum(process.process.returncode is not None for process in processes)


@pytest.mark.parametrize(("kind", "after_tokens"), [("kill", 0), ("kill", 1), ("kill", 40), ("crash_engine", 25)])
async def test_one_poison_among_64_requests_costs_two_of_three_replicas_and_no_other_token(
    kind: str, after_tokens: int
) -> None:
    async with pool_of_processes(3, kind=kind, after_tokens=after_tokens) as (pool, processes):
        innocents = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=150, seed=s))) for s in range(63)]
        await asyncio.sleep(0.1)
        with pytest.raises(InternalError, match="ends the replica"):
            await read(pool.client.stream(POISON, max_tokens=150))
        answers = await asyncio.gather(*innocents)
        await until(lambda: num_dead(processes) >= 2)
        await asyncio.sleep(0.3)
        assert num_dead(processes) == 2
    assert [ids(pieces) for pieces in answers] == [script(PROMPT, seed, 0, 150) for seed in range(63)]
    assert all([piece.sequence for piece in pieces] == list(range(len(pieces))) for pieces in answers)


async def test_a_repeated_poison_is_refused_at_once_and_says_what_it_is() -> None:
    async with pool_of_processes(3, router=MEASURED) as (pool, processes):
        for _ in range(3):
            call = pool.client.stream(POISON, max_tokens=50)
            with pytest.raises(InternalError) as caught:
                await read(call)
            assert caught.value.is_poison
            assert caught.value.request_id
        await until(lambda: num_dead(processes) >= 2)
        assert num_dead(processes) == 2
        seen = await scrape(pool.router.metrics_address)
    assert seen.value("poisoned_requests_total") == 1
    assert seen.value("trials_total") == 1


async def test_suspects_are_tried_in_turn_and_no_stream_waits_long() -> None:
    async with pool_of_processes(3) as (pool, processes):
        gaps: list[float] = []

        async def timed(seed: int) -> tuple[int, ...]:
            received: list[int] = []
            last_s = time.monotonic()
            async for piece in pool.client.stream(PROMPT, max_tokens=200, seed=seed):
                now_s = time.monotonic()
                if received:
                    gaps.append(now_s - last_s)
                last_s = now_s
                received += piece.token_ids
            return tuple(received)

        streams = [asyncio.create_task(timed(seed)) for seed in range(90)]
        await asyncio.sleep(0.8)
        await processes[0].kill()
        answers = await asyncio.gather(*streams)
    assert answers == [script(PROMPT, seed, 0, 200) for seed in range(90)]
    # The gap of a stream on the lost replica: its wait for a trial, and the trial.
    assert max(gaps) < 3.0
