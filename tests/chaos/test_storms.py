"""Many clients that cancel, ask nonsense, come when there is no room, or do not read: nothing leaks, nobody else notices."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from cluster.client import Answer, AsyncAnswerStream, Cancelled, ResourceExhausted
from cluster.config import RouterConfig
from cluster.errors import RemoteError
from protos import control_pb2, generation_pb2, generation_pb2_grpc
from tests.fakes.script_engine import VOCAB_SIZE, ScriptKnobs, script
from tests.fakes.script_pool import FAST, ScriptPool, script_pool
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
NUM_CANCELS = 5_000
NUM_CALLS = 10_000
AT_ONCE = 200


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def num_inside(pool: ScriptPool) -> int:
    """Sequences in rows and queues of all engines."""
    loads = [one.engine.load() for one in pool.replicas]
    return sum(load.running + load.waiting for load in loads)


def is_empty(pool: ScriptPool) -> bool:
    streams = sum(load.router_streams + load.router_outstanding_tokens for load in pool.router.pool.loads())
    return num_inside(pool) == streams == pool.router.pool.num_live == 0


@pytest.mark.slow
async def test_a_storm_of_cancellations_leaves_no_row_task_or_descriptor_behind(rng: random.Random) -> None:
    process = psutil.Process()
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.002, max_rows=64, max_waiting=10_000)) as pool:
        turns = asyncio.Semaphore(AT_ONCE // 2)
        ends: Counter[str] = Counter()

        async def ask(seed: int) -> None:
            async with turns:
                stream, is_begun = pool.client.stream(PROMPT, max_tokens=2000, seed=seed), False
                async with stream:
                    try:
                        async with asyncio.timeout(rng.expovariate(3)):
                            async for _ in stream:
                                is_begun = True
                        ends["answered"] += 1
                    except (TimeoutError, Cancelled):
                        ends["cancelled early" if not is_begun else "cancelled"] += 1

        await asyncio.gather(*(ask(seed) for seed in range(20)))
        await until(lambda: is_empty(pool), 20)
        num_tasks, num_fds = len(asyncio.all_tasks()), process.num_fds()
        survivors = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=300, seed=s))) for s in range(8)]
        await asyncio.gather(*(ask(seed) for seed in range(NUM_CANCELS)))
        print(dict(ends))
        assert ends["cancelled"] > 0.1 * NUM_CANCELS
        assert ends["cancelled"] + ends["cancelled early"] > 0.9 * NUM_CANCELS
        for seed, survivor in enumerate(survivors):
            assert tuple(i for piece in await survivor for i in piece.token_ids) == script(PROMPT, seed, 0, 300)
        await until(lambda: is_empty(pool), 20)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks, 20)
        assert process.num_fds() <= num_fds + 4
        assert {load.breaker for load in pool.router.pool.loads()} == {control_pb2.BREAKER_CLOSED}
        assert (await pool.client.generate(PROMPT, max_tokens=5, seed=9)).token_ids == script(PROMPT, 9, 0, 5)


async def codes_of(pool: ScriptPool, request: generation_pb2.GenerateRequest, count: int) -> Counter[int]:
    """How replicas end so many calls of this request, AT_ONCE of them at the same time."""
    codes: Counter[int] = Counter()
    numbers = iter(range(count))

    async def keep_asking() -> None:
        for number in numbers:
            one = generation_pb2.GenerateRequest(request_id=f"{request.request_id}-{number}")
            one.MergeFrom(request)
            one.request_id = f"{request.request_id}-{number}"
            try:
                async for _ in pool.router.pool.generate(one, timeout_s=None):
                    pass
                codes[0] += 1
            except RemoteError as error:
                codes[error.code] += 1

    await asyncio.gather(*(keep_asking() for _ in range(AT_ONCE)))
    return codes


def request(name: str, *ids: int, max_tokens: int = 4) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=name,
        token_ids=generation_pb2.TokenIds(ids=ids),
        sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, seed=1),
    )


@pytest.mark.slow
async def test_neither_nonsense_nor_a_lack_of_room_trips_a_breaker() -> None:
    async with script_pool(2, knobs=ScriptKnobs(max_rows=2, max_waiting=1, step_s=0.005)) as pool:
        nonsense = await codes_of(pool, request("nonsense", VOCAB_SIZE + 1), NUM_CALLS)
        assert nonsense == {grpc.StatusCode.INVALID_ARGUMENT.value[0]: NUM_CALLS}
        crowd = await codes_of(pool, request("crowd", *PROMPT), NUM_CALLS)
        print(dict(crowd))
        assert crowd[grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]] > 0.5 * NUM_CALLS
        assert crowd.total() == NUM_CALLS
        loads = pool.router.pool.loads()
        assert {load.breaker for load in loads} == {control_pb2.BREAKER_CLOSED}
        assert pool.router._membership.num_trips == 0
        await until(lambda: is_empty(pool), 10)
        assert (await pool.client.generate(PROMPT, max_tokens=5, seed=9)).token_ids == script(PROMPT, 9, 0, 5)


async def drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def read(stream: AsyncAnswerStream) -> list[Answer]:
    return [piece async for piece in stream]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_queued_messages": 10**6, "reader_timeout_s": 60.0},
        {"max_queued_bytes": 10**9, "reader_timeout_s": 60.0},
        {"max_queued_messages": 10**6, "max_queued_bytes": 10**9, "reader_timeout_s": 0.5},
    ],
    ids=["bytes", "messages", "time"],
)
async def test_a_reader_that_stops_loses_its_row_and_nobody_else_notices(limits: dict[str, int]) -> None:
    router: RouterConfig = replace(FAST, **limits)  # type: ignore[arg-type]
    knobs = ScriptKnobs(step_s=0.002, tokens_per_step=4, max_model_len=1_000_000)
    # The least that a peer may keep in flight, so that little is hidden in buffers.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024)]
    async with script_pool(1, router=router, knobs=knobs) as pool:
        async with grpc.aio.insecure_channel(pool.router.address, options=options) as channel:
            greedy = request("greedy", *PROMPT, max_tokens=900_000)
            greedy.sampling.logprobs, greedy.sampling.n = 20, 4
            call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(greedy)
            await call.read()
            others = [asyncio.create_task(read(pool.client.stream(PROMPT, max_tokens=400, seed=s))) for s in range(4)]
            (link,) = pool.router._membership.links
            most = 0

            def is_alone() -> bool:
                nonlocal most
                most = max([most, *(stream._queued_bytes for stream in link._streams.values())])
                return pool.router.pool.loads()[0].router_streams == 0 and num_inside(pool) == 0

            await until(is_alone, 20)
            if "max_queued_bytes" not in limits:
                assert most <= router.max_queued_bytes
            for seed, other in enumerate(others):
                assert tuple(i for piece in await other for i in piece.token_ids) == script(PROMPT, seed, 0, 400)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "fell more than" in (caught.value.details() or "")
        await until(lambda: pool.router.pool.num_live == 0)


async def test_a_router_takes_so_many_streams_at_once_and_says_so() -> None:
    async with script_pool(1, router=replace(FAST, max_streams=4), knobs=ScriptKnobs(step_s=0.01)) as pool:
        streams = [pool.client.stream(PROMPT, max_tokens=2000, seed=seed) for seed in range(4)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ResourceExhausted, match="4 requests are being answered"):
            await pool.client.generate(PROMPT)
        for stream in streams:
            stream.cancel()
        await until(lambda: is_empty(pool))
