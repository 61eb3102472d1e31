"""grpc.health.v1 and what else servers say about themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig
from protos import control_pb2
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import ONE_TRY, ScriptReplica, script_pool, start_replica
from tests.fakes.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "graphpool.v1.GenerationService")
GRAPHS = ("graphpool.v1.graphs.PARTIAL", "graphpool.v1.graphs.FULL")


async def check(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


async def watch(channel: grpc.aio.Channel, service: str) -> AsyncIterator[int]:
    async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
        yield response.status


@pytest.mark.parametrize("service", NAMES)
async def test_watching_a_router_shows_every_change_of_readiness(service: str) -> None:
    async with script_pool(0) as pool, grpc.aio.insecure_channel(pool.router.address) as channel:
        seen = watch(channel, service)
        changes = [await anext(seen)]
        one = await start_replica(ReplicaConfig(routers=(pool.router.address,)))
        changes.append(await asyncio.wait_for(anext(seen), 20))
        drain = asyncio.create_task(one.server.drain(1))
        changes.append(await asyncio.wait_for(anext(seen), 20))
        await drain
        await one.stop()
    assert changes == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_router_serves_while_one_replica_of_several_is_ready() -> None:
    async with script_pool(2) as pool:
        assert [await check(pool.router.address, name) for name in NAMES] == [SERVING, SERVING]
        await pool.replicas[0].server.drain(1)
        await until(lambda: pool.num_ready == 1)
        assert [await check(pool.router.address, name) for name in NAMES] == [SERVING, SERVING]
        await pool.replicas[1].server.drain(1)
        await until(lambda: pool.num_ready == 0)
        assert [await check(pool.router.address, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]


async def test_a_draining_router_ceases_to_serve() -> None:
    async with script_pool(1) as pool:
        await pool.client.drain(grace_s=0)
        assert [await check(pool.router.address, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]


async def test_a_replica_serves_until_it_drains_or_fails() -> None:
    async with script_pool(2) as pool:
        drained, failed = pool.replicas
        assert await check(drained.server.address, "") == SERVING
        await drained.server.drain(1)
        assert await check(drained.server.address, NAMES[1]) == NOT_SERVING
        failed.engine.stop()
        await until(lambda: bool(failed.failures))
        assert await check(failed.server.address, NAMES[1]) == NOT_SERVING


async def test_graph_readiness_is_a_service_of_its_own_on_router_and_replica() -> None:
    async with script_pool(2) as pool:
        (one, other), router = pool.replicas, pool.router.address
        addresses = (one.server.address, other.server.address, router)

        async def seen() -> list[tuple[int, ...]]:
            return [tuple([await check(address, name) for name in GRAPHS]) for address in addresses]

        async def reach(replica: ScriptReplica, readiness: str, expected: list[tuple[int, ...]]) -> None:
            replica.engine.knobs.readiness = readiness
            async with asyncio.timeout(20):
                while await seen() != expected:  # noqa: ASYNC110  # it is asked for over gRPC
                    await asyncio.sleep(0.05)

        no, partial, full = (NOT_SERVING, NOT_SERVING), (SERVING, NOT_SERVING), (SERVING, SERVING)
        assert await seen() == [no, no, no]
        await reach(one, "partial", [partial, no, partial])
        await reach(other, "full", [partial, full, full])
        await other.server.drain(1)
        await reach(other, "full", [partial, no, partial])
        await reach(one, "eager", [no, no, no])
        assert await check(router, "") == SERVING


@pytest.mark.parametrize("is_router", [True, False], ids=["router", "replica"])
async def test_watching_graph_readiness_shows_it_come_and_go(is_router: bool) -> None:
    async with script_pool(1) as pool:
        one = pool.replicas[0]
        address = pool.router.address if is_router else one.server.address
        async with grpc.aio.insecure_channel(address) as channel:
            partial, full = watch(channel, GRAPHS[0]), watch(channel, GRAPHS[1])
            changes = [await anext(partial), await anext(full)]
            one.engine.knobs.readiness = "partial"
            changes.append(await asyncio.wait_for(anext(partial), 20))
            one.engine.knobs.readiness = "full"
            changes.append(await asyncio.wait_for(anext(full), 20))
            drain = asyncio.create_task(one.server.drain(1))
            changes += [await asyncio.wait_for(anext(seen), 20) for seen in (partial, full)]
            await drain
    assert changes == [NOT_SERVING, NOT_SERVING, SERVING, SERVING, NOT_SERVING, NOT_SERVING]


async def test_a_replica_that_replays_graphs_is_given_the_requests_until_it_is_four_times_as_busy() -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.02)) as pool:
        fast, slow = pool.replicas
        fast.engine.knobs.readiness = "full"
        await until(lambda: pool.router.pool.readiness == control_pb2.GRAPH_READINESS_FULL)

        async def placed(streams: int) -> list[int]:
            for _ in range(streams):
                await stack.enter_async_context(pool.client.stream((1, 2, 3), max_tokens=1000))
                await until(lambda: pool.router.pool.num_live == len(asked) + 1)
                asked.append(1)
            by_name = {load.replica: load.router_streams for load in pool.router.pool.loads()}
            return [by_name[one.server.name] for one in (fast, slow)]

        asked: list[int] = []
        async with contextlib.AsyncExitStack() as stack:
            assert await placed(3) == [3, 0]
            # From here on the slow one is as soon through with one as the fast one with four.
            assert (await placed(7))[1] in (1, 2)


async def test_a_service_that_is_not_there_is_not_found() -> None:
    async with script_pool(0) as pool:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(pool.router.address, "nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_servers_say_who_they_are() -> None:
    async with script_pool(1) as pool:
        replica = pool.replicas[0].server
        async with AsyncGraphpoolClient(replica.address, ONE_TRY) as direct:
            mine, theirs = await pool.client.status(), await direct.status()
    assert (mine.server.role, mine.server.id, mine.server.model) == ("router", pool.router.name, "script")
    assert (theirs.server.role, theirs.server.id, theirs.server.model) == ("replica", replica.incarnation, "script")
    assert mine.server.uptime_s > 0
    assert [load.incarnation for load in mine.replicas] == [load.incarnation for load in theirs.replicas]
