"""What a client is told when there is too much to do, and who goes first."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, GraphpoolClient, ResourceExhausted
from cluster.config import ClientConfig
from cluster.criticality import KEY
from protos import control_pb2, generation_pb2, generation_pb2_grpc
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
ONE_ROW = ScriptKnobs(max_rows=1, step_s=0.01)


def request(max_tokens: int, seed: int = 1) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, seed=seed),
    )


async def ask(
    channel: grpc.aio.Channel, asked: generation_pb2.GenerateRequest, *criticality: str, timeout_s: float | None = None
) -> generation_pb2.GenerateResponse:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    metadata = tuple((KEY, value) for value in criticality)
    answer: generation_pb2.GenerateResponse = await stub.Generate(asked, metadata=metadata, timeout=timeout_s)
    return answer


async def busy(pool: ScriptPool, max_tokens: int = 2000) -> asyncio.Task[Any]:
    """Somebody who holds the only row."""
    before = pool.router.pool.num_live
    task = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=max_tokens, seed=1))
    await until(lambda: pool.router.pool.num_live == before + 1 and pool.replicas[0].engine.load().running == 1)
    return task


async def test_the_most_critical_start_first() -> None:
    async with script_pool(1, knobs=ONE_ROW) as pool:
        holder = await busy(pool, 30)
        order: list[str] = []

        async def note(name: str) -> None:
            await ask(channel, request(3), name)
            order.append(name)

        async with grpc.aio.insecure_channel(pool.router.address) as channel:
            names = ["sheddable", "critical", "sheddable-plus", "critical-plus"]
            asked = [asyncio.create_task(note(name)) for name in names]
            await until(lambda: pool.replicas[0].engine.load().waiting == 4)
            await asyncio.gather(holder, *asked)
    assert order == ["critical-plus", "critical", "sheddable-plus", "sheddable"]


@pytest.mark.parametrize("value", ["urgent", "", "CRITICAL"])
async def test_a_criticality_nobody_knows_is_an_invalid_argument(value: str) -> None:
    async with script_pool(1) as pool:
        for address in (pool.router.address, pool.replicas[0].server.address):
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="graphpool-criticality: must be one of") as caught:
                    await ask(channel, request(3), value)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_would_miss_its_deadline_in_the_queue_is_refused_at_once_with_a_time_to_come_back() -> None:
    async with script_pool(1, knobs=ONE_ROW) as pool:
        for _ in range(3):
            await pool.client.generate(PROMPT, max_tokens=100, seed=1)
        holder = await busy(pool)
        async with grpc.aio.insecure_channel(pool.router.address, options=[("grpc.enable_retries", 0)]) as channel:
            started_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError, match="would not come in time") as caught:
                await ask(channel, request(100), timeout_s=1.0)
            assert time.monotonic() - started_s < 0.5
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers: Any = caught.value.trailing_metadata() or ()
            assert 80 <= int(dict(trailers)["grpc-retry-pushback-ms"]) <= 6000
        assert pool.replicas[0].engine.load().waiting == 0
        holder.cancel()


async def test_with_every_queue_full_requests_are_refused_and_sheddable_ones_before() -> None:
    async with script_pool(1, router=replace(FAST, max_waiting=4), knobs=ONE_ROW) as pool:
        holder = await busy(pool)
        async with grpc.aio.insecure_channel(pool.router.address, options=[("grpc.enable_retries", 0)]) as channel:
            queued = [asyncio.create_task(ask(channel, request(3), "critical-plus")) for _ in range(2)]
            await until(lambda: pool.router.pool.num_live == 3)
            with pytest.raises(grpc.aio.AioRpcError, match="queues of all replicas are full"):
                await ask(channel, request(3), "sheddable")
            queued += [asyncio.create_task(ask(channel, request(3), "critical-plus")) for _ in range(2)]
            await until(lambda: pool.router.pool.num_live == 5)
            with pytest.raises(grpc.aio.AioRpcError, match="queues of all replicas are full"):
                await ask(channel, request(3), "critical-plus")
            holder.cancel()
            assert {tuple(answer.choices[0].token_ids) for answer in await asyncio.gather(*queued)} == {
                script(PROMPT, 1, 0, 3)
            }


async def test_a_request_one_replica_has_no_room_for_is_given_to_another() -> None:
    async with script_pool(2, knobs=ScriptKnobs(max_rows=1, max_waiting=1, step_s=0.01)) as pool:
        small, large = pool.replicas
        # Seen from outside it looks idle, and is full.
        small.engine.knobs.max_waiting = 0
        answers = [await pool.client.generate(PROMPT, max_tokens=3, seed=1) for _ in range(2)]
        assert {answer.execution.replica for answer in answers if answer.execution} == {large.server.name}
        assert max(answer.execution.attempts for answer in answers if answer.execution) == 2


async def test_when_all_replicas_are_full_few_requests_are_tried_twice() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.01)) as pool:
        for one in pool.replicas:
            one.engine.knobs.max_waiting = 0
        for _ in range(100):
            with pytest.raises(ResourceExhausted, match="sequences are waiting"):
                await pool.client.generate(PROMPT, max_tokens=3)
        assert {load.breaker for load in pool.router.pool.loads()} == {control_pb2.BREAKER_CLOSED}
        assert pool.router._metrics._repeated <= 0.1 * 100 + 5


async def test_requests_that_expire_in_the_queue_never_start() -> None:
    async with script_pool(1, knobs=ScriptKnobs(max_rows=1, step_s=0.01)) as pool:
        holder = await busy(pool)
        engine = pool.replicas[0].engine
        async with grpc.aio.insecure_channel(pool.router.address) as channel:
            # Nothing was answered yet, so that the router does not know better than to take them on.
            results = await asyncio.gather(
                *(ask(channel, request(5, seed), timeout_s=0.2) for seed in range(200)), return_exceptions=True
            )
        codes = Counter(error.code().name for error in results if isinstance(error, grpc.aio.AioRpcError))
        # CANCELLED when the server's end of a call notices first; refused when it took its time to get here.
        assert codes.keys() <= {"DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}
        assert codes["DEADLINE_EXCEEDED"] > 100
        assert codes.total() == 200
        await until(lambda: engine.load().waiting == 0)
        holder.cancel()
        await until(lambda: engine.load().running == 0)
        # Two tokens of the canary; all others are the holder's.
        assert engine._num_tokens <= 2 + engine._steps


async def test_decoding_stops_when_the_deadline_comes() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01)) as pool:
        async with grpc.aio.insecure_channel(pool.router.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, request(2000), timeout_s=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: pool.replicas[0].engine.load().running == 0, 2)


async def test_a_client_says_what_all_its_calls_are_worth() -> None:
    async with script_pool(1, router=replace(FAST, max_waiting=4), knobs=ONE_ROW) as pool:
        holder = await busy(pool)
        queued = asyncio.create_task(pool.client.generate(PROMPT, max_tokens=3, seed=1))
        await until(lambda: pool.replicas[0].engine.load().waiting == 1)
        modest = ClientConfig(max_attempts=1, criticality="sheddable")
        async with AsyncGraphpoolClient(pool.router.address, modest) as client:
            with pytest.raises(ResourceExhausted):
                await client.generate(PROMPT, max_tokens=3)
            with pytest.raises(ResourceExhausted):
                await anext(client.stream(PROMPT, max_tokens=3))
        with GraphpoolClient(pool.router.address, modest) as blocking, pytest.raises(ResourceExhausted):
            await asyncio.to_thread(blocking.generate, PROMPT, max_tokens=3)
        holder.cancel()
        assert (await queued).token_ids == script(PROMPT, 1, 0, 3)
