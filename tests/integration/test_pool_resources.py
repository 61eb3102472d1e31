"""Whatever ends, nothing is left behind; whoever is slow, nobody else pays."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from cluster.client import AsyncGraphpoolClient, ResourceExhausted
from cluster.config import ReplicaConfig
from protos import generation_pb2, generation_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import FAST, ONE_TRY, ScriptPool, script_pool, start_replica
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


def num_tasks() -> int:
    return len(asyncio.all_tasks())


def is_empty(pool: ScriptPool) -> bool:
    loads = pool.router.pool.loads()
    return (
        pool.router.pool.num_live == 0
        and all(load.router_streams == 0 and load.router_outstanding_tokens == 0 for load in loads)
        and all(one.server.num_live == 0 for one in pool.replicas)
        and all(one.engine.load().running + one.engine.load().waiting == 0 for one in pool.replicas)
    )


@pytest.mark.parametrize("is_direct", [False, True])
async def test_five_hundred_cancelled_streams_leave_nothing_behind(is_direct: bool) -> None:
    rng = random.Random(7)
    process = psutil.Process()
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.001, max_waiting=1000)) as pool:
        address = pool.replicas[0].server.address if is_direct else pool.router.address
        client = AsyncGraphpoolClient(address, ONE_TRY)
        survivors = [asyncio.create_task(client.generate(PROMPT, max_tokens=300, seed=seed)) for seed in range(4)]
        await asyncio.sleep(0.1)
        tasks, files = num_tasks() - len(survivors), process.num_fds()

        async def ask_and_leave() -> None:
            async with client.stream(PROMPT, max_tokens=3000) as stream:
                for _ in range(rng.randrange(3)):
                    await anext(stream)
                await asyncio.sleep(rng.random() * 0.05)

        for _ in range(10):
            await asyncio.gather(*(ask_and_leave() for _ in range(50)))
        answers = await asyncio.gather(*survivors)
        await until(lambda: is_empty(pool))
        gc.collect()
        await until(lambda: num_tasks() <= tasks)
        assert process.num_fds() <= files + 2
        await client.close()
    assert [answer.token_ids for answer in answers] == [script(PROMPT, seed, 0, 300) for seed in range(4)]


async def test_a_client_that_vanishes_frees_its_row_within_a_few_steps() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.005)) as pool:
        client = AsyncGraphpoolClient(pool.router.address, ONE_TRY)
        stream = client.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await client.close()
        await until(lambda: is_empty(pool), 0.5)


async def test_every_way_a_request_can_end_returns_the_count_of_outstanding_tokens_to_zero() -> None:
    knobs = ScriptKnobs(step_s=0.001, fail_on_prompt=(66, 66))
    async with script_pool(2, knobs=knobs) as pool:

        async def ask(number: int) -> None:
            prompt = ((66, 66), (1, 999_999), PROMPT)[number % 3]
            timeout_s = (None, 0.02)[number % 2]
            await pool.client.generate(prompt, max_tokens=1 + number, n=1 + number % 3, timeout_s=timeout_s)

        await asyncio.gather(*(ask(number) for number in range(90)), return_exceptions=True)
        await until(lambda: is_empty(pool))


async def test_a_reader_that_stops_reading_is_cut_off_and_nobody_else_waits_for_it() -> None:
    router = replace(FAST, max_queued_messages=64)
    replica = ReplicaConfig(flush_interval_ms=0, max_flush_interval_ms=0)
    knobs = ScriptKnobs(step_s=0.001, tokens_per_step=400, max_model_len=50_000_000)
    async with script_pool(1, router=router, replica=replica, knobs=knobs) as pool:
        # A fixed window: by default gRPC lets a fast reader have more and more on its way.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        async with grpc.aio.insecure_channel(pool.router.address, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            sampling = generation_pb2.SamplingParams(max_tokens=40_000_000)
            call = stub.GenerateStream(generation_pb2.GenerateRequest(text="x", sampling=sampling))
            await call.read()
            before = psutil.Process().memory_info().rss
            await until(lambda: pool.router.pool.loads()[0].router_streams == 0, 10)
            assert psutil.Process().memory_info().rss - before < 64 * 1024 * 1024
            await until(lambda: pool.replicas[0].engine.load().running == 0)
            assert (await pool.client.generate(PROMPT, max_tokens=800, seed=1)).token_ids == script(PROMPT, 1, 0, 800)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "fell more than 64 messages behind" in (caught.value.details() or "")


async def test_a_direct_reader_that_stops_reading_is_cut_off_too() -> None:
    knobs = ScriptKnobs(step_s=0.001, tokens_per_step=2000, max_model_len=50_000_000)
    one = await start_replica(ReplicaConfig(flush_interval_ms=0, max_flush_interval_ms=0), knobs)
    client = AsyncGraphpoolClient(one.server.address, ONE_TRY)
    stream = client.stream(PROMPT, max_tokens=40_000_000)
    await anext(stream)
    await until(lambda: one.engine.load().running == 0, 15)
    with pytest.raises(ResourceExhausted, match="behind"):
        async for _ in stream:
            pass
    await client.close()
    await one.stop()


async def test_a_router_that_does_not_read_loses_its_stream_and_its_requests() -> None:
    knobs = ScriptKnobs(step_s=0.001, tokens_per_step=200, max_model_len=50_000_000)
    config = ReplicaConfig(write_timeout_s=0.5, flush_interval_ms=0, max_flush_interval_ms=0)
    one = await start_replica(config, knobs)
    hold = asyncio.Event()

    async def frames() -> AsyncIterator[replica_pb2.RouterFrame]:
        for stream_id in range(1, 33):
            request = generation_pb2.GenerateRequest(request_id=f"r{stream_id}", text="x")
            request.sampling.max_tokens = 40_000_000
            yield replica_pb2.RouterFrame(submit=replica_pb2.Submit(stream_id=stream_id, generate=request))
        await hold.wait()

    async with grpc.aio.insecure_channel(one.server.address) as channel:
        call: Any = replica_pb2_grpc.ReplicaServiceStub(channel).Attach(frames())
        assert (await call.read()).hello.incarnation == one.server.incarnation
        await until(lambda: one.engine.load().running == 32)
        await until(lambda: one.engine.load().running == 0 and one.server.num_live == 0, 10)
        hold.set()
    async with AsyncGraphpoolClient(one.server.address, ONE_TRY) as client:
        assert (await client.generate(PROMPT, max_tokens=20, seed=1)).token_ids == script(PROMPT, 1, 0, 20)
    await one.stop()


@pytest.mark.parametrize(
    "frame",
    [
        replica_pb2.RouterFrame(submit=replica_pb2.Submit(stream_id=1)),
        replica_pb2.RouterFrame(
            submit=replica_pb2.Submit(stream_id=7, generate=generation_pb2.GenerateRequest(text="y"))
        ),
    ],
)
async def test_a_router_that_breaks_the_inner_contract_is_refused(frame: replica_pb2.RouterFrame) -> None:
    one = await start_replica(knobs=ScriptKnobs(step_s=0.01))
    async with grpc.aio.insecure_channel(one.server.address) as channel:
        stub: Any = replica_pb2_grpc.ReplicaServiceStub(channel)
        call = stub.Attach()
        request = generation_pb2.GenerateRequest(request_id="r", text="x")
        await call.write(replica_pb2.RouterFrame(submit=replica_pb2.Submit(stream_id=7, generate=request)))
        await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: one.engine.load().running == 0)
    await one.stop()


async def test_a_stream_that_ends_takes_all_its_requests_along() -> None:
    async with script_pool(1, knobs=ScriptKnobs(step_s=0.01)) as pool:
        streams = [pool.client.stream(PROMPT, max_tokens=3000) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        await pool.router.stop()
        await until(lambda: pool.replicas[0].engine.load().running == 0)
        await until(lambda: pool.replicas[0].server.num_live == 0)
