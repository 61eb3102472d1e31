"""Bad requests, clients that leave, deadlines and a killed process, with the embedded model behind it all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from cluster.client import AsyncGraphpoolClient, DeadlineExceeded, GraphpoolClient, Unavailable
from protos import control_pb2
from tests.fakes.bad_requests import Target, load_cases, run_case
from tests.fakes.real_pool import (
    MAX_BATCH,
    MAX_MODEL_LEN,
    RealPool,
    Server,
    real_pool,
    real_router,
    real_worker,
    reference,
    wait_ready,
)
from tests.fakes.scrape import fetch, parse
from tests.fakes.script_pool import ONE_TRY

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PROMPT = "To bake bread at home you need flour, water, yeast and salt.\n\n1. First,"
REFUSED_WITHIN_S = 2.0
"""Generous: the model keeps every core busy meanwhile."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RealPool]:
    with real_pool() as started:
        yield started


@pytest.fixture
async def client(pool: RealPool) -> AsyncIterator[AsyncGraphpoolClient]:
    async with AsyncGraphpoolClient(pool.router.address, ONE_TRY) as opened:
        yield opened


async def load_of(worker: Server) -> control_pb2.Load:
    async with AsyncGraphpoolClient(worker.address) as direct:
        return (await direct.loads())[0].load


async def settled(worker: Server, timeout_s: float = 30.0) -> control_pb2.Load:
    """The load once nothing runs or waits; every block is then free."""
    async with asyncio.timeout(timeout_s), AsyncGraphpoolClient(worker.address) as direct:
        while True:
            load = (await direct.loads())[0].load
            if load.running == load.waiting == 0 and load.free_blocks == load.total_blocks:
                return load
            await asyncio.sleep(0.02)


async def answer_of(client: AsyncGraphpoolClient, max_tokens: int = 24) -> tuple[int, ...]:
    return (await client.generate(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)).token_ids


async def test_the_corpus_of_bad_requests_disturbs_no_neighbour(pool: RealPool, client: AsyncGraphpoolClient) -> None:
    alone = await answer_of(client)
    is_over = asyncio.Event()

    async def stay() -> list[tuple[int, ...]]:
        answers = []
        while not is_over.is_set():
            stream = client.stream(PROMPT, max_tokens=len(alone), temperature=0.0, ignore_eos=True)
            answers.append(tuple([token async for piece in stream for token in piece.token_ids]))
        return answers

    vocab_size = (await client.model_info()).vocab_size
    target = Target(
        address=pool.router.address,
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        control_tokens=reference().control_tokens,
    )
    cases = [case for case in load_cases() if not case.needs]
    neighbour = asyncio.create_task(stay())
    failures = []
    async with grpc.aio.insecure_channel(target.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for case in cases:
            outcome = await run_case(channel, target, case)
            is_late = case.code != "OK" and outcome.seconds > REFUSED_WITHIN_S
            if outcome.code != case.code or not outcome.details.startswith(case.field) or is_late:
                failures.append((case.name, outcome))
        assert not neighbour.done()
        is_over.set()
    assert failures == []
    assert len(cases) >= 85
    assert set(await neighbour) == {alone}
    await settled(pool.worker)


async def test_a_client_that_leaves_frees_its_slot_and_blocks_within_two_steps(
    pool: RealPool, client: AsyncGraphpoolClient
) -> None:
    late = []
    for _ in range(3):
        before = await settled(pool.worker)
        received = 0
        async with client.stream(PROMPT, max_tokens=1000, temperature=0.0, ignore_eos=True) as stream:
            while received < 12:
                received += len((await anext(stream)).token_ids)
        after = await settled(pool.worker)
        # One step brought each token, the first one's prefill included.
        late.append(after.steps - before.steps - received)
    assert min(late) <= 2, late
    assert max(late) < 50, late


async def test_a_hundred_clients_that_leave_at_any_moment_leave_nothing_behind(
    pool: RealPool, client: AsyncGraphpoolClient
) -> None:
    alone = await answer_of(client)
    rng = random.Random(3)

    async def ask_and_leave(number: int) -> None:
        async with client.stream(f"{number}. {PROMPT}", max_tokens=1000, ignore_eos=True) as stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 2.5)):
                    async for _ in stream:
                        pass

    leaving = asyncio.gather(*(ask_and_leave(number) for number in range(100)))
    most = 0
    while not leaving.done():
        load = await load_of(pool.worker)
        most = max(most, load.running + load.waiting)
        await asyncio.sleep(0.05)
    await leaving
    assert most > MAX_BATCH
    load = await settled(pool.worker)
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
    assert await answer_of(client) == alone
    async with asyncio.timeout(20):
        while any(seen.router_streams or seen.router_outstanding_tokens for seen in await client.loads()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_deadline_ends_the_request_and_its_work(pool: RealPool, client: AsyncGraphpoolClient) -> None:
    before = await settled(pool.worker)
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await client.generate(PROMPT, max_tokens=1500, temperature=0.0, ignore_eos=True, timeout_s=0.2)
    assert 0.15 < time.monotonic() - started_s < 2
    after = await settled(pool.worker)
    assert after.steps - before.steps < 300
    await asyncio.sleep(0.3)
    assert (await settled(pool.worker)).steps == after.steps


def test_the_stream_of_a_killed_worker_waits_for_a_new_one_at_its_address_and_its_canary() -> None:
    options = {"temperature": 0.0, "ignore_eos": True}
    with real_router() as router, GraphpoolClient(router.address, ONE_TRY) as client:
        with real_worker(router) as worker:
            wait_ready(router, worker)
            first = client.generate(PROMPT, max_tokens=16, **options).token_ids  # type: ignore[arg-type]
            stream = client.stream(PROMPT, max_tokens=48, **options)  # type: ignore[arg-type]
            received = list(next(stream).token_ids)
            worker.process.kill()
            worker.process.wait(30)
        with pytest.raises(Unavailable):
            client.generate(PROMPT, max_tokens=16, **options)  # type: ignore[arg-type]
        with real_worker(router, port=int(worker.address.rpartition(":")[2])) as fresh:
            assert fresh.address == worker.address
            wait_ready(router, fresh)
            for piece in stream:
                received += piece.token_ids
            assert len(received) == 48
            assert piece.execution is not None
            assert piece.execution.attempts == 2
            assert parse(fetch(fresh.metrics_address)).value("requests_total", code="OK") == 2
            assert client.generate(PROMPT, max_tokens=16, **options).token_ids == first  # type: ignore[arg-type]
        assert parse(fetch(router.metrics_address)).value("placements_total") == 4
